"""Greedy tokens equal transformers', whatever the scheduler does: the matrix of its settings on a tiny model."""

import itertools

import pytest

from tests.engine.conftest import NUM_TOKENS, PROMPTS
from tests.engine.loop import make_sequence
from tests.soak import is_long

SETTINGS = (
    ("prefill_first", "chunked"),
    (0, 1),  # asynchronous depth
    ("off", "hash", "radix"),
    ("recompute", "swap"),
    (0, 5, 16),  # prefill chunk
    (1, 16, 32),  # block size
)


def is_in_the_short_version(places: tuple[int, ...]) -> bool:
    """One combination in seven, evenly spread."""
    return (sum(places[:4]) + 2 * sum(places[4:])) % 3 == 0 and sum(places[2:]) % 2 == 0


MATRIX = [
    tuple(levels[i] for levels, i in zip(SETTINGS, places, strict=True))
    for places in itertools.product(*(range(len(levels)) for levels in SETTINGS))
    if is_long() or is_in_the_short_version(places)
]


def test_any_three_settings_are_seen_in_all_their_ways():
    for columns in itertools.combinations(range(len(SETTINGS)), 3):
        seen = {tuple(row[column] for column in columns) for row in MATRIX}
        assert seen == set(itertools.product(*(SETTINGS[column] for column in columns)))


def sequences():
    return [make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.soak
@pytest.mark.parametrize(("policy", "depth", "prefix", "mode", "chunk", "block_size"), MATRIX)
def test_greedy_tokens(tiny, policy, depth, prefix, mode, chunk, block_size):
    """The cache holds about a third of what all sequences need, so some have to go and come back."""
    loop = tiny.loop(
        block_size,
        num_tokens_in_cache=160 if block_size == 32 else 128,
        prefix=prefix,
        scheduling_policy=policy,
        async_depth=depth,
        preemption_mode=mode,
        max_prefill_chunk=chunk,
        watermark=0.0,
    )
    tokens = loop.run(*sequences())
    assert [tokens[i] for i in range(len(PROMPTS))] == tiny.references
    load = loop.scheduler.load()
    assert load.num_preemptions > 0
    assert (load.num_swaps > 0) == (mode == "swap")


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest_remaining", "cheapest_recompute"])
@pytest.mark.parametrize(("mode", "depth"), [("recompute", 0), ("swap", 1)])
def test_victim_policies(tiny, policy, mode, depth):
    loop = tiny.loop(
        16,
        num_tokens_in_cache=128,
        prefix="hash",
        preemption_policy=policy,
        preemption_mode=mode,
        async_depth=depth,
        watermark=0.0,
    )
    queue = [make_sequence(i, prompt, NUM_TOKENS, priority=i % 3) for i, prompt in enumerate(PROMPTS)]
    tokens = loop.run(*queue)
    assert [tokens[i] for i in range(len(PROMPTS))] == tiny.references
    assert loop.scheduler.load().num_preemptions > 0


@pytest.mark.parametrize("prefix", ["hash", "radix"])
@pytest.mark.parametrize("depth", [0, 1])
def test_arrivals_one_a_step_hit_what_earlier_ones_left(tiny, prefix, depth):
    loop = tiny.loop(16, prefix=prefix, async_depth=depth)
    tokens = loop.run(*sequences(), each_step=1)
    assert [tokens[i] for i in range(len(PROMPTS))] == tiny.references
    assert loop.scheduler.load().num_prefix_hits >= 32


@pytest.mark.parametrize("depth", [0, 1])
def test_known_limits_are_not_overrun(tiny, depth):
    """Tokens computed: prompt + max_tokens − 1, exactly."""
    loop = tiny.loop(16, async_depth=depth)
    loop.run(*sequences())
    assert loop.num_scheduled_tokens == sum(len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS)


@pytest.mark.parametrize("prefix", ["hash", "radix"])
def test_the_same_prompt_again_and_again(tiny, prefix):
    """What was generated is cached, too, and changes nothing."""
    loop = tiny.loop(16, prefix=prefix)
    number = PROMPTS.index(max(PROMPTS, key=len))
    cached = []
    for i in range(3):
        tokens = loop.run(make_sequence(i, PROMPTS[number], NUM_TOKENS))
        assert tokens[i] == tiny.references[number]
        cached.append(loop.ended[i].num_cached_tokens)
    assert cached == [0, 48, 48]


@pytest.mark.parametrize("prefix", ["hash", "radix"])
@pytest.mark.parametrize(("length", "num_hits"), [(32, 16), (16, 0), (1, 0)])
def test_a_prompt_that_is_cached_to_its_end_computes_its_last_block(tiny, prefix, length, num_hits):
    """Cases 1 and 64: counted by the sequence and by the scheduler; the tokens are those of the first time."""
    loop = tiny.loop(16, prefix=prefix)
    prompt = PROMPTS[3][:length]
    loop.run(make_sequence(0, prompt, 8))
    num_first = loop.num_scheduled_tokens
    tokens = loop.run(make_sequence(1, prompt, 8))
    assert tokens[1] == tokens[0]
    assert loop.ended[1].num_cached_tokens == loop.scheduler.load().num_prefix_hits == num_hits
    assert loop.num_scheduled_tokens - num_first == length - num_hits + 7
