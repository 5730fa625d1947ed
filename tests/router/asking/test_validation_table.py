"""Every field of a request has a rule, or a reason why it needs none."""

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from fissile.v1 import ChatRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest
from router.asking.rules import RULES

NEEDS_NO_RULE = {
    "model": "looked up before anything else",
    "add_special_tokens": "both values mean something",
    "skip_special_tokens": "both values mean something",
    "continue_final_message": "both values mean something; the template may refuse",
    "messages[].content": "any text; its size counts into messages",
    "messages[].name": "any text; its size counts into messages",
    "messages[].reasoning": "any text; its size counts into messages",
    "messages[].tool_call_id": "any text; its size counts into messages",
    "messages[].tool_calls[].id": "any text; its size counts into messages",
    "messages[].tool_calls[].name": "any text; its size counts into messages",
    "tools[].description": "any text; its size counts into tools",
    "options.sampling.seed": "all 64 bits",
    "options.sampling.beam_search.early_stopping": "both values mean something",
    "options.min_tokens": "compared with max_tokens",
    "options.include_stop": "both values mean something",
    "options.ignore_eos": "compared with structured_output",
    "options.priority": "any number",
    "options.skip_special_tokens": "both values mean something",
    "options.output.text": "both values mean something",
    "options.output.token_ids": "both values mean something",
    "options.output.cumulative": "both values mean something",
    "options.output.final_only": "both values mean something",
    "options.output.prompt_token_ids": "compared with prompts",
    "tool_choice.names": "compared with tools",
    "tool_choice.single_call": "both values mean something",
}

_WHOLE = {"google.protobuf.Duration", "google.protobuf.Struct", "fissile.v1.CompositeGrammar"}
"""Messages that have a rule as a whole."""


def leaves(message: Descriptor, at: str = ""):
    for field in message.fields:
        path = at + field.name
        is_message = field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.full_name not in _WHOLE
        if is_message:
            is_list = field.is_repeated
            yield from leaves(field.message_type, f"{path}[]." if is_list else f"{path}.")
        else:
            yield path


def test_every_field_has_a_rule_or_a_reason():
    for kind, rules in RULES.items():
        fields = set(leaves(kind.DESCRIPTOR))
        assert fields - rules.keys() - NEEDS_NO_RULE.keys() == set(), kind
        assert not rules.keys() & NEEDS_NO_RULE.keys()


def test_no_reason_is_stale():
    fields = {path for kind in RULES for path in leaves(kind.DESCRIPTOR)}
    assert NEEDS_NO_RULE.keys() <= fields


def test_every_request_with_fields_to_check_is_in_the_table():
    assert set(RULES) == {GenerateRequest, ChatRequest, TokenizeRequest, DetokenizeRequest}
