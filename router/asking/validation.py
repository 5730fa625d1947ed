"""Checks a whole request: each field by its rule (`rules`), then fields together (`rules_together`).

Violations are reported together, each by the path of its field (`options.sampling.logit_bias[3].bias`); the search ends
once there are more than a reply has room for. The entries of a list that is at fault itself, such as one that is too
long, are not looked at.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from google.protobuf.message import Message

from common import bounds
from fissile.errors import MAX_VIOLATIONS, FieldViolation, InvalidArgumentError
from fissile.v1 import ChatRequest, GenerateRequest
from router.asking.checks import Check, Fault, Limits, too_long, too_many
from router.asking.rules import RULES
from router.asking.rules_together import broken_together

_ENTRY_BYTES = 128
"""Of an empty message or tool call."""
_LEAST = Limits(1, 1, 1)
_VALUE_FACTOR = 20
"""Memory of an empty value of a template's arguments, over its two bytes on the wire."""


class ContextError(InvalidArgumentError):
    """A prompt is too long for the context that was looked at; there may be a longer one."""


@dataclass(slots=True)
class _Node:
    """Rules of one field, or with `is_each` of every entry of a list, and of what is below it."""

    name: str
    is_each: bool
    may_be_absent: bool
    """Nothing is wrong with it where it is not set, or with a list or text that is empty."""
    check: Check | None = None
    below: dict[str, "_Node"] = field(default_factory=dict)


def _tree(kind: type[Message], rules: Mapping[str, Check]) -> dict[str, _Node]:
    """Rules by the steps of their paths, so that what is not set costs one look, whatever is below it."""
    root: dict[str, _Node] = {}
    for path, check in rules.items():
        level = root
        holder: Any = kind.DESCRIPTOR
        for step in path.split("."):
            name = step.removesuffix("[]")
            descriptor = holder.fields_by_name[name]
            is_each = step != name
            node = level.setdefault(step, _Node(name, is_each, may_be_absent=is_each or descriptor.has_presence))
            level, holder = node.below, descriptor.message_type
        node.check = check
        node.may_be_absent = node.may_be_absent or not check(descriptor.default_value, _LEAST)
    return root


_TREES = {kind: _tree(kind, rules) for kind, rules in RULES.items()}


def validate(request: Message, limits: Limits) -> None:
    """Raises InvalidArgumentError with the first violations."""
    refuse(chain(_broken(request, _TREES[type(request)], limits), broken_together(request, limits)))


def check_counts(request: GenerateRequest | ChatRequest) -> None:
    """Before a request waits for anything: entries, even empty ones, are many times larger here than on their way.
    Raises InvalidArgumentError."""
    options, sampling = request.options, request.options.sampling
    lists: list[tuple[str, Sequence[Any], int]] = [
        ("options.stop", options.stop, bounds.MAX_STOPS),
        ("options.bad_words", options.bad_words, bounds.MAX_BAD_WORDS),
        ("options.stop_token_sequences", options.stop_token_sequences, bounds.MAX_STOP_SEQUENCES),
        ("options.sampling.logit_bias", sampling.logit_bias, bounds.MAX_BIASES),
        ("options.sampling.bad_token_sequences", sampling.bad_token_sequences, bounds.MAX_BAD_SEQUENCES),
    ]
    if isinstance(request, GenerateRequest):
        lists.append(("prompts", request.prompts, bounds.MAX_PROMPTS))
    else:
        lists.append(("messages", request.messages, bounds.MAX_MESSAGES))
        lists.append(("tools", request.tools, bounds.MAX_TOOLS))
    refuse(FieldViolation(path, fault) for path, values, most in lists if (fault := too_many(values, most)) is not None)


def held_bytes(request: GenerateRequest | ChatRequest) -> int:
    """Memory that it takes while it waits, by estimate, of one whose lists are no longer than they may be."""
    num_bytes = request.ByteSize()
    if isinstance(request, ChatRequest):
        num_calls = sum(len(message.tool_calls) for message in request.messages)
        num_bytes += (len(request.messages) + num_calls) * _ENTRY_BYTES
        num_bytes += request.template_arguments.ByteSize() * _VALUE_FACTOR
    return num_bytes


def refuse(violations: Iterable[FieldViolation]) -> None:
    """Raises InvalidArgumentError with the first of them, if there are any; takes no more than that."""
    first = list(islice(violations, MAX_VIOLATIONS + 1))
    if first:
        text = "; ".join(f"{v.field}: {v.description}" for v in first[:MAX_VIOLATIONS])
        if len(first) > MAX_VIOLATIONS:
            text += "; and more"
        raise InvalidArgumentError(text, violations=first[:MAX_VIOLATIONS])


def check_length(field: str, num_tokens: int, limits: Limits) -> None:
    """Raises InvalidArgumentError for a prompt without tokens, and ContextError for one that leaves no room for one."""
    if num_tokens == 0:
        raise InvalidArgumentError.of(field, "has no tokens")
    if num_tokens >= limits.max_model_len:
        raise ContextError.of(field, too_long(num_tokens, limits))


def _broken(message: Message, tree: dict[str, _Node], limits: Limits, at: str = "") -> Iterator[FieldViolation]:
    values = {field.name: value for field, value in message.ListFields()}
    lists_at_fault = set()
    for node in tree.values():
        name = node.name
        if (node.may_be_absent and name not in values) or name in lists_at_fault:
            continue
        value = values[name] if name in values else getattr(message, name)
        if node.is_each:
            for i, entry in enumerate(value):
                yield from _broken_at(f"{at}{name}[{i}]", node, entry, limits)
            continue
        for violation in _broken_at(f"{at}{name}", node, value, limits):
            lists_at_fault.add(name)
            yield violation


def _broken_at(path: str, node: _Node, value: Any, limits: Limits) -> Iterable[FieldViolation]:
    fault = node.check(value, limits) if node.check else None
    if not node.below and not fault:
        return ()
    return _violations(path, node, value, limits, fault)


def _violations(
    path: str, node: _Node, value: Any, limits: Limits, fault: Fault | str | None
) -> Iterator[FieldViolation]:
    if isinstance(fault, Fault):
        yield FieldViolation(path + fault.at, fault.text)
    elif fault:
        yield FieldViolation(path, fault)
    if node.below:
        yield from _broken(value, node.below, limits, f"{path}.")
