"""The one table from field to rule, with the bounds that both services have (`common.bounds`).

`[]` in a path stands for every entry of a list. A field that is not set breaks no rule; one without presence counts as
set where the message that it is in is set.
"""

from google.protobuf.message import Message

from common import bounds
from fissile.v1 import ChatRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest
from router.asking.checks import (
    Check,
    all_of,
    at_most_bytes,
    at_most_encoded,
    at_most_prompt_bytes,
    at_most_vocabulary,
    calls_together,
    characters,
    constraint,
    distinct,
    dp_rank,
    duration_of_at_least,
    encoded_bytes,
    entries,
    finite,
    is_routers,
    is_true,
    matches,
    not_empty,
    prompt_bytes,
    role,
    shorter_than_context,
    together_at_most_bytes,
    token_id,
    token_ids,
    tool_choice_mode,
    within,
)
from router.asking.json_checks import finite_numbers, json_object, json_schema

_GRAMMAR: Check = all_of(not_empty, at_most_bytes(bounds.MAX_GRAMMAR_BYTES))
_PROMPT_TEXT: Check = all_of(not_empty, prompt_bytes)
_PROMPT_TOKENS: Check = all_of(not_empty, shorter_than_context, token_ids)

SAMPLING_RULES: dict[str, Check] = {
    "temperature": within(bounds.TEMPERATURE),
    "top_k": within(bounds.TOP_K),
    "top_p": within(bounds.TOP_P),
    "min_p": within(bounds.MIN_P),
    "presence_penalty": within(bounds.PRESENCE_PENALTY),
    "frequency_penalty": within(bounds.FREQUENCY_PENALTY),
    "repetition_penalty": within(bounds.REPETITION_PENALTY),
    "logit_bias": all_of(entries(0, bounds.MAX_BIASES), distinct(lambda entry: entry.token_id, "token_id")),
    "logit_bias[].token_id": token_id,
    "logit_bias[].bias": within(bounds.BIAS),
    "allowed_token_ids": all_of(at_most_vocabulary, token_ids),
    "banned_token_ids": all_of(at_most_vocabulary, token_ids),
    "bad_token_sequences": entries(0, bounds.MAX_BAD_SEQUENCES),
    "bad_token_sequences[].token_ids": all_of(entries(1, bounds.MAX_BAD_SEQUENCE_TOKENS), token_ids),
    "num_logprobs": within(bounds.NUM_LOGPROBS),
    "num_prompt_logprobs": within(bounds.NUM_LOGPROBS),
    "beam_search.width": within(bounds.BEAM_WIDTH),
    "beam_search.length_penalty": finite,
    "structured_output": constraint,
    "structured_output.json_schema": all_of(_GRAMMAR, json_schema),
    "structured_output.json_object": is_true,
    "structured_output.regex": _GRAMMAR,
    "structured_output.grammar": _GRAMMAR,
    "structured_output.choice.choices": all_of(
        entries(1, bounds.MAX_CHOICES), together_at_most_bytes(bounds.MAX_GRAMMAR_BYTES)
    ),
    "structured_output.choice.choices[]": not_empty,
    "structured_output.composite": is_routers,
}
OPTION_RULES: dict[str, Check] = {
    **{f"sampling.{path}": rule for path, rule in SAMPLING_RULES.items()},
    "max_tokens": within(bounds.MAX_TOKENS),
    "stop": entries(0, bounds.MAX_STOPS),
    "stop[]": characters(1, bounds.MAX_STOP_CHARACTERS),
    "stop_token_ids": all_of(entries(0, bounds.MAX_STOP_TOKENS), token_ids),
    "stop_token_sequences": entries(0, bounds.MAX_STOP_SEQUENCES),
    "stop_token_sequences[].token_ids": all_of(entries(1, bounds.MAX_STOP_SEQUENCE_TOKENS), token_ids),
    "n": within(bounds.N),
    "cache_salt": at_most_bytes(bounds.MAX_SALT_BYTES),
    "routing_key": at_most_bytes(bounds.MAX_ROUTING_KEY_BYTES),
    "dp_rank": dp_rank,
    "output.heartbeat": duration_of_at_least(bounds.MIN_HEARTBEAT_SECONDS),
    "bad_words": entries(0, bounds.MAX_BAD_WORDS),
    "bad_words[]": characters(1, bounds.MAX_BAD_WORD_CHARACTERS),
}
_COMMON: dict[str, Check] = {
    "request_id": all_of(characters(0, bounds.MAX_REQUEST_ID_CHARACTERS), matches("[ -~]*", "printable ASCII")),
    **{f"options.{path}": rule for path, rule in OPTION_RULES.items()},
}

RULES: dict[type[Message], dict[str, Check]] = {
    GenerateRequest: {
        **_COMMON,
        "text": _PROMPT_TEXT,
        "tokens.token_ids": _PROMPT_TOKENS,
        "prompts": all_of(entries(0, bounds.MAX_PROMPTS), encoded_bytes),
        "prompts[].text": _PROMPT_TEXT,
        "prompts[].tokens.token_ids": _PROMPT_TOKENS,
    },
    ChatRequest: {
        **_COMMON,
        "messages": all_of(
            not_empty, entries(1, bounds.MAX_MESSAGES), calls_together(bounds.MAX_TOOL_CALLS), encoded_bytes
        ),
        "messages[].role": role,
        "messages[].tool_calls[].arguments": json_object,
        "tools": all_of(entries(0, bounds.MAX_TOOLS), encoded_bytes, distinct(lambda tool: tool.name, "name")),
        "tools[].name": matches("[a-zA-Z0-9_.-]{1,64}", "1 to 64 of a-z A-Z 0-9 _ . -"),
        "tools[].parameters": json_object,
        "tool_choice.mode": tool_choice_mode,
        "template_arguments": all_of(at_most_encoded(bounds.MAX_TEMPLATE_BYTES), finite_numbers),
        "chat_template": at_most_bytes(bounds.MAX_TEMPLATE_BYTES),
    },
    TokenizeRequest: {"text": prompt_bytes},
    DetokenizeRequest: {"token_ids": all_of(at_most_prompt_bytes, token_ids)},
}
