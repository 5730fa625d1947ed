"""Errors name fields of our protobuf messages; a client of this front has written JSON."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fissile.errors import FieldViolation, FissileError

_Rules = tuple[tuple[str, str], ...]
"""Pattern of a whole path, and what it is in the JSON body. The first that fits counts."""

_COMMON: _Rules = (
    (r"options\.sampling\.logit_bias.*", "logit_bias"),
    (r"options\.sampling\.bad_token_sequences.*", "bad_words"),
    (r"options\.include_stop", "include_stop_str_in_output"),
    (r"options\.routing_key", "prompt_cache_key"),
    (r"options\.sampling\.(.+)", r"\1"),
    (r"options\.(.+)", r"\1"),
)
_COMPLETION: _Rules = (
    (r"text|tokens(\..*)?|token_ids.*|prompts", "prompt"),
    (r"prompts(\[\d+\]).*", r"prompt\1"),
    (r"options\.sampling\.num_logprobs", "logprobs"),
    (r"options\.sampling\.num_prompt_logprobs", "echo"),
    *_COMMON,
)
_CHAT: _Rules = (
    (r"tools(\[\d+\])\.(.+)", r"tools\1.function.\2"),
    (r"(messages\[\d+\])\.tool_calls(\[\d+\])\.(name|arguments)", r"\1.tool_calls\2.function.\3"),
    (r"(messages\[\d+\])\.reasoning", r"\1.reasoning_content"),
    (r"tool_choice\..*", "tool_choice"),
    (r"template_arguments(.*)", r"chat_template_kwargs\1"),
    (r"options\.sampling\.num_logprobs", "top_logprobs"),
    *_COMMON,
)


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Of one request. `own`: where its client had a choice of fields."""

    rules: _Rules
    own: Mapping[str, str] = field(default_factory=dict)

    def with_own(self, own: Mapping[str, str]) -> "FieldNames":
        return replace(self, own=own)

    def of(self, path: str) -> str:
        """The name in the JSON body of a path in the protobuf message."""
        for mine, name in self.own.items():
            if path == mine or path.startswith((f"{mine}.", f"{mine}[")):
                return name
        for pattern, name in self.rules:
            match = re.fullmatch(pattern, path)
            if match:
                return match.expand(name)
        return path

    def translate(self, error: FissileError) -> FissileError:
        """The same error about the JSON body."""
        if not error.violations:
            return error
        violations = [FieldViolation(self.of(v.field), v.description) for v in error.violations]
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        return type(error)(text, violations=violations, retry_after=error.retry_after)


COMPLETION_NAMES = FieldNames(_COMPLETION)
CHAT_NAMES = FieldNames(_CHAT)
