"""The stop rule: earliest position first, then stop sequence, EOS, stop id, max_tokens, model length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.builders import Engine, make_sequence
from worker.core.batch import BatchOutput
from worker.core.params import StopConditions
from worker.core.stopping import FinishReason, find_stop

PROMPT = [1, 2, 3]


def stop(max_tokens: int = 100, **conditions: object) -> StopConditions:
    sets = {name: frozenset(value) for name, value in conditions.items() if name.endswith("_ids")}
    return StopConditions(max_tokens=max_tokens, **(conditions | sets))


@pytest.mark.parametrize(
    ("new", "conditions", "expected"),
    [
        ([10, 42, 12], stop(stop_token_ids=[42]), (2, FinishReason.STOP_TOKEN)),
        ([10, 11, 12], stop(max_tokens=2), (2, FinishReason.LENGTH)),
        ([10, 11, 9, 20, 21, 22], stop(max_tokens=5, stop_token_ids=[9]), (3, FinishReason.STOP_TOKEN)),
        ([10, 11, 12, 13, 14, 9], stop(max_tokens=5, stop_token_ids=[9]), (5, FinishReason.LENGTH)),
        ([5, 6, 0, 7, 8], stop(eos_token_ids=[0]), (3, FinishReason.EOS)),
        ([5, 0, 7], stop(eos_token_ids=[]), (3, None)),
        ([5, 0], stop(eos_token_ids=[0], stop_token_ids=[5]), (1, FinishReason.STOP_TOKEN)),
        ([], stop(), (0, None)),
        ([7, 8, 9], stop(stop_token_sequences=((8, 9),)), (3, FinishReason.STOP_SEQUENCE)),
    ],
)
def test_the_earliest_position_wins(new: list[int], conditions: StopConditions, expected: object) -> None:
    assert find_stop(PROMPT, new, 3, conditions, 1000) == expected


@pytest.mark.parametrize(
    ("conditions", "model_limit", "reason"),
    [
        (stop(1, eos_token_ids=[7], stop_token_ids=[7], stop_token_sequences=((7,),)), 4, FinishReason.STOP_SEQUENCE),
        (stop(1, eos_token_ids=[7], stop_token_ids=[7]), 4, FinishReason.EOS),
        (stop(1, stop_token_ids=[7]), 4, FinishReason.STOP_TOKEN),
        (stop(1), 4, FinishReason.LENGTH),
        (stop(2), 4, FinishReason.MODEL_LENGTH),
    ],
)
def test_order_at_one_position(conditions: StopConditions, model_limit: int, reason: FinishReason) -> None:
    assert find_stop(PROMPT, [7], 3, conditions, model_limit) == (1, reason)


def test_min_tokens_suppresses_every_eos_id_and_stop() -> None:
    conditions = stop(eos_token_ids=[0, 1], stop_token_ids=[2], stop_token_sequences=((1, 0),), min_tokens=3)
    assert find_stop(PROMPT, [1, 0, 1, 5], 3, conditions, 1000) == (3, FinishReason.EOS)
    assert find_stop(PROMPT, [2, 5, 5], 3, conditions, 1000) == (3, None)


def test_min_tokens_does_not_suppress_the_limits() -> None:
    assert find_stop(PROMPT, [5, 5, 5], 3, stop(2, min_tokens=10), 1000) == (2, FinishReason.LENGTH)


def test_stop_sequence_does_not_match_across_the_end_of_the_prompt() -> None:
    assert find_stop([1, 2, 3], [4], 3, stop(stop_token_sequences=((3, 4),)), 1000) == (1, None)
    assert find_stop([1, 2, 3, 3], [4], 3, stop(stop_token_sequences=((3, 4),)), 1000) == (
        1,
        FinishReason.STOP_SEQUENCE,
    )


tokens = st.integers(0, 4)


@given(
    prompt=st.lists(tokens, min_size=1, max_size=4),
    generated=st.lists(tokens, max_size=6),
    eos=st.frozensets(tokens, max_size=2),
    stop_ids=st.frozensets(tokens, max_size=2),
    sequences=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    min_tokens=st.integers(0, 4),
    max_tokens=st.integers(1, 8),
    model_limit=st.integers(6, 12),
)
def test_one_token_at_a_time_is_the_same_as_all_at_once(
    prompt: list[int],
    generated: list[int],
    eos: frozenset[int],
    stop_ids: frozenset[int],
    sequences: tuple[tuple[int, ...], ...],
    min_tokens: int,
    max_tokens: int,
    model_limit: int,
) -> None:
    conditions = StopConditions(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        eos_token_ids=eos,
        stop_token_ids=stop_ids,
        stop_token_sequences=sequences,
    )
    kept, reason = find_stop(prompt, generated, len(prompt), conditions, model_limit)
    committed = list(prompt)
    for at, token in enumerate(generated, start=1):
        _, one = find_stop(committed, [token], len(prompt), conditions, model_limit)
        committed.append(token)
        if one is not None:
            assert (at, one) == (kept, reason)
            return
    assert (kept, reason) == (len(generated), None)


@given(
    generated=st.lists(tokens, min_size=8, max_size=8),
    eos=st.frozensets(tokens, max_size=2),
    stop_ids=st.frozensets(tokens, max_size=2),
    sequences=st.sampled_from([(), ((1, 2),)]),
    min_tokens=st.integers(0, 4),
    max_tokens=st.integers(1, 7),
)
def test_the_schedulers_short_path_agrees_with_the_rule(
    generated, eos, stop_ids, sequences, min_tokens, max_tokens
) -> None:
    sequence = make_sequence(
        1,
        [9, 9, 9],
        max_tokens,
        eos=tuple(eos),
        stop_ids=tuple(stop_ids),
        stop_sequences=sequences,
        min_tokens=min_tokens,
    )
    kept, reason = find_stop([9, 9, 9], generated, 3, sequence.stop, 8)
    engine = Engine(max_model_len=8)
    engine.scheduler.add(sequence)
    for token in generated:
        batch = engine.scheduler.schedule()
        if batch is None:
            break
        engine.scheduler.postprocess(batch, BatchOutput(step=batch.step, token_ids=[[token]]))
    engine.check()
    assert (engine.tokens[1], engine.ended[1].finish_reason) == (generated[:kept], reason)


def test_accepted_run_is_cut_at_the_stop_and_nothing_after_it_is_kept() -> None:
    engine = Engine()
    engine.scheduler.add(sequence := make_sequence(1, [5, 6], 10, eos=(0,)))
    batch = engine.scheduler.schedule()
    engine.scheduler.postprocess(batch, BatchOutput(step=0, token_ids=[[7, 8, 0, 9, 9]]))
    (output,) = engine.scheduler.take_outputs()
    assert (output.token_ids, output.token_offset, output.finish_reason) == ([7, 8, 0], 0, FinishReason.EOS)
    assert list(sequence.token_ids) == [5, 6, 7, 8, 0]
