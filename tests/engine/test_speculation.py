"""With drafts, right or wrong, each request gets what it gets without: tokens, ends, log probabilities."""

from dataclasses import replace

import pytest

from tests.engine.conftest import PROMPTS, TinyModel
from tests.engine.loop import GREEDY, Loop, make_sequence
from tests.engine.mix import MIX as COMMON_MIX
from tests.engine.mix import NUM_TOKENS
from tests.engine.reciter import Reciter
from worker.core.params import SamplingParams, StopConditions
from worker.core.sequence import Sequence

MIX = [
    *COMMON_MIX,
    SamplingParams(seed=7, min_p=0.05, temperature=0.7),
]
STOPS = [
    StopConditions(max_tokens=NUM_TOKENS),
    StopConditions(max_tokens=NUM_TOKENS, min_tokens=9, eos_token_ids=frozenset(range(0, 128, 3))),
    StopConditions(max_tokens=NUM_TOKENS, stop_token_ids=frozenset(range(0, 128, 11)), min_tokens=5),
]


def sequences(stop: StopConditions) -> list[Sequence]:
    return [make_sequence(i, PROMPTS[i], NUM_TOKENS, params, stop=stop) for i, params in enumerate(MIX)]


def close(found, expected) -> bool:
    """The same entries, up to the order of additions and of what is as likely."""
    return (found is None) == (expected is None) and all(
        mine[0][0] == theirs[0][0] and [a[1] for a in mine] == pytest.approx([b[1] for b in theirs], abs=1e-4)
        for mine, theirs in zip(found or [], expected or [], strict=True)
    )


def check(loop: Loop, plain: Loop) -> None:
    assert loop.tokens == plain.tokens
    for i, end in plain.ended.items():
        assert loop.ended[i].finish_reason is end.finish_reason
        assert close(loop.logprobs.get(i), plain.logprobs.get(i))
        assert close(loop.prompt_logprobs.get(i), plain.prompt_logprobs.get(i))
    load = loop.scheduler.load()
    assert 0 < load.num_accepted_tokens < load.num_draft_tokens


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(("policy", "chunk"), [("prefill_first", 0), ("chunked", 7)])
def test_any_rules_of_sampling(tiny: TinyModel, backend, policy, chunk, stop) -> None:
    """Tight enough that some are preempted in between."""
    plain = tiny.loop(16, kernel_backend=backend)
    plain.run(*sequences(stop))
    loop = tiny.loop(
        16, 144, "hash", backend, Reciter(plain.tokens, 1), num_speculative_tokens=5, async_depth=0,
        scheduling_policy=policy, max_prefill_chunk=chunk, watermark=0.0,
    )  # fmt: skip
    loop.run(*sequences(stop))
    check(loop, plain)
    if not stop.min_tokens:
        assert loop.scheduler.load().num_preemptions > 0


@pytest.mark.parametrize("block_size", [1, 16])
def test_swap_and_arrivals_in_between(tiny: TinyModel, block_size) -> None:
    plain = tiny.loop(block_size)
    plain.run(*sequences(STOPS[0]))
    loop = tiny.loop(
        block_size, 128, "radix", drafter=Reciter(plain.tokens, 2), num_speculative_tokens=3, async_depth=0,
        preemption_mode="swap", watermark=0.0,
    )  # fmt: skip
    loop.run(*sequences(STOPS[0]), each_step=1)
    check(loop, plain)


def test_what_was_generated_with_drafts_is_cached_as_it_would_be_without(tiny: TinyModel) -> None:
    """Verified tokens alone: a second turn that begins with the first one's answer goes on as if computed anew."""
    plain = tiny.loop(16)
    first = plain.run(make_sequence(0, PROMPTS[3], 24))[0]
    again = [*PROMPTS[3], *first]
    wanted = tiny.loop(16).run(make_sequence(1, again, 12))[1]
    drafter = Reciter({0: first, 1: wanted}, 3)
    loop = tiny.loop(16, 1024, "hash", drafter=drafter, num_speculative_tokens=7, async_depth=0)
    loop.run(make_sequence(0, PROMPTS[3], 24))
    assert loop.run(make_sequence(1, again, 12)) == {0: first, 1: wanted}
    assert loop.ended[1].num_cached_tokens == len(again) // 16 * 16 - (len(again) % 16 == 0) * 16


def test_right_drafts_save_steps(tiny: TinyModel) -> None:
    plain = tiny.loop(16)
    tokens = plain.run(make_sequence(0, PROMPTS[2], 21, replace(GREEDY, num_logprobs=1)))

    class Perfect(Reciter):
        def propose(self, seq: Sequence, most: int) -> list[int]:
            return self._tokens[seq.id][seq.num_generated_tokens :][:most]

    drafter = Perfect(dict(tokens), 0)
    loop = tiny.loop(16, drafter=drafter, num_speculative_tokens=4, async_depth=0)
    loop.run(make_sequence(0, PROMPTS[2], 21, replace(GREEDY, num_logprobs=1)))
    assert loop.tokens == tokens and close(loop.logprobs[0], plain.logprobs[0])
    assert loop.scheduler.load().num_steps == 1 + 20 // 5
    assert loop.scheduler.load().accepted_counts == (0, 0, 0, 0, 4)
