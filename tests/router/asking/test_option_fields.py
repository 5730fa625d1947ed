"""Where an answer ends, and what is sent of it: what is refused, in exact words, and what is just allowed."""

from tests.router.asking.requests import BEYOND, ask, bad_fields, borders, faults, heartbeat, sequences

BAD = [
    (ask(max_tokens=0), "options.max_tokens", "must be at least 1, is 0"),
    (ask(min_tokens=3, max_tokens=2), "options.min_tokens", "must not exceed max_tokens 2, is 3"),
    (ask(stop=["a"] * 17), "options.stop", "must have at most 16 entries, has 17"),
    (ask(stop=["a", ""]), "options.stop[1]", "must have 1 to 1024 characters, has 0"),
    (ask(stop=["a" * 1025]), "options.stop[0]", "must have 1 to 1024 characters, has 1025"),
    (ask(stop_token_ids=[1, 100]), "options.stop_token_ids[1]", BEYOND),
    (ask(stop_token_ids=[1] * 1025), "options.stop_token_ids", "must have at most 1024 entries, has 1025"),
    (
        ask(stop_token_sequences=sequences(*[[1]] * 65)),
        "options.stop_token_sequences",
        "must have at most 64 entries, has 65",
    ),
    (ask(stop_token_sequences=sequences([1], [])), "options.stop_token_sequences[1].token_ids", "must not be empty"),
    (
        ask(stop_token_sequences=sequences([1] * 257)),
        "options.stop_token_sequences[0].token_ids",
        "must have at most 256 entries, has 257",
    ),
    (ask(stop_token_sequences=sequences([100])), "options.stop_token_sequences[0].token_ids[0]", BEYOND),
    (ask(n=0), "options.n", "must be 1 ≤ value ≤ 128, is 0"),
    (ask(n=129), "options.n", "must be 1 ≤ value ≤ 128, is 129"),
    (ask(cache_salt=b"x" * 257), "options.cache_salt", "must have at most 256 bytes, has 257"),
    (ask(routing_key="é" * 129), "options.routing_key", "must have at most 256 bytes, has 258"),
    (ask(dp_rank=2), "options.dp_rank", "must be below 2, is 2"),
    (heartbeat(0), "options.output.heartbeat", "must be at least 0.01 s, is 0 s"),
    (heartbeat(-1000), "options.output.heartbeat", "must be at least 0.01 s, is -1 s"),
]


@bad_fields(BAD)
def test_a_bad_field_is_named_with_value_and_limit(request_, field, words):
    assert faults(request_)[field] == words


GOOD = [
    ask(n=128, max_tokens=1, stop=["x" * 1024] * 16, stop_token_ids=[99] * 1024, min_tokens=1),
    ask(n=1, max_tokens=2**32 - 1, stop_token_sequences=sequences(*[[99] * 256] * 64)),
    ask(cache_salt=b"x" * 256, routing_key="é" * 128, dp_rank=1, priority=-(2**31)),
    heartbeat(10),
]


@borders(GOOD)
def test_borders_are_allowed(request_):
    assert faults(request_) == {}
