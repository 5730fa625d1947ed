"""The one table from field to rule, and the limits in it.

`[]` in a path stands for every entry of a list. A field that is not set breaks no rule; one without presence counts as
set where the message that it is in is set.
"""

from google.protobuf.message import Message

from fissile.v1 import ChatRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest
from router.validation_checks import (
    Check,
    all_of,
    at_least,
    at_most_bytes,
    at_most_encoded,
    at_most_prompt_bytes,
    at_most_vocabulary,
    between,
    calls_together,
    characters,
    constraint,
    distinct,
    dp_rank,
    duration_of_at_least,
    encoded_bytes,
    entries,
    finite,
    finite_numbers,
    is_routers,
    is_true,
    json_object,
    json_schema,
    matches,
    not_empty,
    prompt_bytes,
    role,
    shorter_than_context,
    together_at_most_bytes,
    token_id,
    token_ids,
    tool_choice_mode,
)

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024
MAX_STOP_SEQUENCES = 64
MAX_STOP_SEQUENCE_TOKENS = 256
MAX_COMPLETIONS = 128
MAX_PROMPTS = 256
MAX_LOGPROBS = 64
MAX_BIASES = 1024
MAX_BAD_SEQUENCES = 256
MAX_BAD_SEQUENCE_TOKENS = 32
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 1024
MIN_BEAMS = 2
MAX_BEAMS = 16
MAX_GRAMMAR_BYTES = 1024 * 1024
MAX_CHOICES = 1024
MAX_TEMPLATE_BYTES = 1024 * 1024
MAX_TOOLS = 1024
MAX_MESSAGES = 16_384
MAX_TOOL_CALLS = 16_384
MAX_KEY_BYTES = 256
MAX_REQUEST_ID_CHARACTERS = 128
MIN_HEARTBEAT_SECONDS = 0.01

_GRAMMAR: Check = all_of(not_empty, at_most_bytes(MAX_GRAMMAR_BYTES))
_PROMPT_TEXT: Check = all_of(not_empty, prompt_bytes)
_PROMPT_TOKENS: Check = all_of(not_empty, shorter_than_context, token_ids)

SAMPLING_RULES: dict[str, Check] = {
    "temperature": between(0, 100),
    "top_k": at_least(-1),
    "top_p": between(0, 1, above_low=True),
    "min_p": between(0, 1),
    "presence_penalty": between(-2, 2),
    "frequency_penalty": between(-2, 2),
    "repetition_penalty": between(0, 2, above_low=True),
    "logit_bias": all_of(entries(0, MAX_BIASES), distinct(lambda entry: entry.token_id, "token_id")),
    "logit_bias[].token_id": token_id,
    "logit_bias[].bias": between(-100, 100),
    "allowed_token_ids": all_of(at_most_vocabulary, token_ids),
    "banned_token_ids": all_of(at_most_vocabulary, token_ids),
    "bad_token_sequences": entries(0, MAX_BAD_SEQUENCES),
    "bad_token_sequences[].token_ids": all_of(entries(1, MAX_BAD_SEQUENCE_TOKENS), token_ids),
    "num_logprobs": between(0, MAX_LOGPROBS),
    "num_prompt_logprobs": between(0, MAX_LOGPROBS),
    "beam_search.width": between(MIN_BEAMS, MAX_BEAMS),
    "beam_search.length_penalty": finite,
    "structured_output": constraint,
    "structured_output.json_schema": all_of(_GRAMMAR, json_schema),
    "structured_output.json_object": is_true,
    "structured_output.regex": _GRAMMAR,
    "structured_output.grammar": _GRAMMAR,
    "structured_output.choice.choices": all_of(entries(1, MAX_CHOICES), together_at_most_bytes(MAX_GRAMMAR_BYTES)),
    "structured_output.choice.choices[]": not_empty,
    "structured_output.composite": is_routers,
}
OPTION_RULES: dict[str, Check] = {
    **{f"sampling.{path}": rule for path, rule in SAMPLING_RULES.items()},
    "max_tokens": at_least(1),
    "stop": entries(0, MAX_STOPS),
    "stop[]": characters(1, MAX_STOP_CHARACTERS),
    "stop_token_ids": all_of(entries(0, MAX_STOP_TOKENS), token_ids),
    "stop_token_sequences": entries(0, MAX_STOP_SEQUENCES),
    "stop_token_sequences[].token_ids": all_of(entries(1, MAX_STOP_SEQUENCE_TOKENS), token_ids),
    "n": between(1, MAX_COMPLETIONS),
    "cache_salt": at_most_bytes(MAX_KEY_BYTES),
    "dp_rank": dp_rank,
    "output.heartbeat": duration_of_at_least(MIN_HEARTBEAT_SECONDS),
    "bad_words": entries(0, MAX_BAD_WORDS),
    "bad_words[]": characters(1, MAX_BAD_WORD_CHARACTERS),
}
_COMMON: dict[str, Check] = {
    "request_id": all_of(characters(0, MAX_REQUEST_ID_CHARACTERS), matches("[ -~]*", "printable ASCII")),
    **{f"options.{path}": rule for path, rule in OPTION_RULES.items()},
}

RULES: dict[type[Message], dict[str, Check]] = {
    GenerateRequest: {
        **_COMMON,
        "text": _PROMPT_TEXT,
        "tokens.token_ids": _PROMPT_TOKENS,
        "prompts": all_of(entries(0, MAX_PROMPTS), encoded_bytes),
        "prompts[].text": _PROMPT_TEXT,
        "prompts[].tokens.token_ids": _PROMPT_TOKENS,
    },
    ChatRequest: {
        **_COMMON,
        "messages": all_of(not_empty, entries(1, MAX_MESSAGES), calls_together(MAX_TOOL_CALLS), encoded_bytes),
        "messages[].role": role,
        "messages[].tool_calls[].arguments": json_object,
        "tools": all_of(entries(0, MAX_TOOLS), encoded_bytes, distinct(lambda tool: tool.name, "name")),
        "tools[].name": matches("[a-zA-Z0-9_.-]{1,64}", "1 to 64 of a-z A-Z 0-9 _ . -"),
        "tools[].parameters": json_object,
        "tool_choice.mode": tool_choice_mode,
        "template_arguments": all_of(at_most_encoded(MAX_TEMPLATE_BYTES), finite_numbers),
        "chat_template": at_most_bytes(MAX_TEMPLATE_BYTES),
    },
    TokenizeRequest: {"text": prompt_bytes},
    DetokenizeRequest: {"token_ids": all_of(at_most_prompt_bytes, token_ids)},
}
