"""The language of chat templates: Jinja with what `transformers` adds to it and keeps from it, which templates are
written for. Importing `transformers` itself would take a router most of a second, and 25 MB.

Templates come with models and with requests, so they run in Jinja's sandbox and change nothing.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_COMPILED = 128
"""Templates that are kept: compiling one takes milliseconds."""
_MARK = "[the model goes on here] "
"""Behind a message that is to be continued. Its last blank tells whether the template strips messages."""


@lru_cache(MOST_COMPILED)
def compiled(source: str) -> Template:
    """Raises jinja2.TemplateSyntaxError, or RecursionError for what is nested too deeply."""
    return _ENVIRONMENT.from_string(source)


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    *,
    continues: bool = False,
) -> str:
    """The conversation as text. `continues`: up to the end of what the last message says, so that a model goes on with
    it. All that is given is plain data, as JSON has it. Raises whatever the template does, and ValueError for a message
    that cannot be continued."""
    template, variables = compiled(source), {"documents": None, **variables}
    if not continues:
        return template.render(messages=messages, tools=tools, **variables)
    content = _content(source, messages)
    marked = [*messages[:-1], {**messages[-1], "content": _marked(content)}]
    text = template.render(messages=marked, tools=tools, **variables)
    before, mark, after = text.rpartition(_MARK.rstrip())
    if not mark or _last_text(content).strip() not in text:
        raise ValueError("the template does not show the end of the last message, which is to be continued")
    return before if after.startswith(" ") else before.rstrip()


def _content(source: str, messages: Sequence[Mapping[str, Any]]) -> Any:
    """Of the last message. Raises ValueError where it says nothing that could be continued."""
    content = messages[-1].get("content") if messages else None
    if content is None or "content" not in source:
        raise ValueError("there is no content of a last message to continue")
    return content


def _marked(content: Any) -> Any:
    if isinstance(content, str):
        return content + _MARK
    last = _last_place(content)
    return [{**part, "text": part["text"] + _MARK} if i == last else part for i, part in enumerate(content)]


def _last_text(content: Any) -> str:
    return content if isinstance(content, str) else str(content[_last_place(content)]["text"])


def _last_place(parts: Sequence[Mapping[str, Any]]) -> int:
    """Of a part with text. Raises ValueError."""
    places = [i for i, part in enumerate(parts) if "text" in part]
    if not places:
        raise ValueError("the last message, which is to be continued, has no text")
    return places[-1]


class _Generation(Extension):
    """`{% generation %}` stands around what a model has said; it shows what is in it."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` of a template, without the attributes of a type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` of a template, whose names begin with no underscore: the sandbox trusts such attributes of its own
    objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as its base: `self` may be a name in it
        names = dict(*args[1:], **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a name in a namespace begins with an underscore: {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would write <, >, & and ' as for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace,
    }  # fmt: skip
    return environment


_ENVIRONMENT = _environment()
