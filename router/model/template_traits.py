"""What a chat template does with what it is given, found out by rendering it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from common.jinja import render
from router.model.chat_template import SPECIAL_TOKENS, ChatTemplate

logger = logging.getLogger(__name__)

_TEXT, _OTHER = "what the user says", "WHAT another says "
"""Of one length: a template that looks at characters only counts them."""
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
    }
]
_TOKENS: Mapping[str, Any] = {name: f"<{name}>" for name in SPECIAL_TOKENS}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Of one template."""

    wants_parts: bool
    """Content is shown where it is a list of parts, and not where it is a text."""
    shows_content: bool
    """What a user says makes a difference, in one of the two forms."""
    knows_tools: bool
    """Tools make a difference."""


@lru_cache(maxsize=64)
def traits_of(source: str) -> TemplateTraits:
    """A few renderings the first time, of a model's template when it is loaded."""
    shows_text = _shows(source, _as_text)
    wants_parts = not shows_text and _shows(source, _as_parts)
    form = _as_parts if wants_parts else _as_text
    return TemplateTraits(wants_parts, shows_text or wants_parts, _shows_tools(source, form))


def look_at(template: ChatTemplate) -> None:
    """When a model is loaded, so that no request waits for it. The log says what conversations will meet."""
    for source in filter(None, (template.default, template.with_tools)):
        if not traits_of(source).shows_content:
            logger.warning("a chat template does not show what the user says; such conversations are refused")


def _as_text(text: str) -> Any:
    return text


def _as_parts(text: str) -> Any:
    return [{"type": "text", "text": text}]


def _shows(source: str, form: Callable[[str], Any]) -> bool:
    one, other = (_rendered(source, form(text)) for text in (_TEXT, _OTHER))
    return one is not None and one != other


def _shows_tools(source: str, form: Callable[[str], Any]) -> bool:
    """In a conversation with or without a system's message. A template that refuses both has not shown anything, and
    gets the benefit of the doubt."""
    pairs = [(_rendered(source, form(_TEXT), n), _rendered(source, form(_TEXT), n, _TOOLS)) for n in (0, 1)]
    seen = [without != with_tools for without, with_tools in pairs if without or with_tools]
    return any(seen) or not seen


def _rendered(source: str, content: Any, num_systems: int = 0, tools: Any = None) -> str | None:
    """None: it refuses such a conversation."""
    messages = [{"role": "system", "content": content}] * num_systems + [{"role": "user", "content": content}]
    try:
        return render(source, messages, tools, {"add_generation_prompt": True, **_TOKENS})
    # A template is a program: whatever it raises means that it refuses.
    except Exception:
        return None
