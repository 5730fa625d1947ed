"""What the scheduler does with log probabilities, and what it tells the runner of early endings."""

from tests.core.builders import Engine, make_sequence
from worker.core.batch import BatchOutput, NewSequence, TokenLogprobs
from worker.core.params import SamplingParams
from worker.core.sequence import Sequence
from worker.core.stopping import FinishReason


def entries(*token_ids: int) -> list[TokenLogprobs]:
    return [[(token, -float(token), 1)] for token in token_ids]


def step(engine: Engine, **answer: object) -> list[NewSequence]:
    """Runs a step of one row with this answer; what it bound."""
    batch = engine.scheduler.schedule()
    assert batch is not None
    answer.setdefault("token_ids", [[]])
    engine.scheduler.postprocess(batch, BatchOutput(step=batch.step, **answer))
    return batch.new_sequences


def asking(prompt: list[int], max_tokens: int = 4, **stop: object) -> Sequence:
    seq = make_sequence(1, prompt, max_tokens, **stop)
    seq.sampling = SamplingParams(num_logprobs=0, num_prompt_logprobs=0)
    return seq


def test_each_token_comes_with_its_own() -> None:
    engine = Engine()
    engine.scheduler.add(asking([5], max_tokens=2))
    step(engine, token_ids=[[3]], logprobs={0: entries(3)})
    step(engine, token_ids=[[4]], logprobs={0: entries(4)})
    outputs = engine.scheduler.take_outputs()
    assert [(o.token_ids, o.logprobs) for o in outputs] == [([3], entries(3)), ([4], entries(4))]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_a_run_that_is_cut_loses_those_of_what_is_cut_off() -> None:
    """Case 50: ids, log probabilities and counts end at the stop."""
    engine = Engine()
    engine.scheduler.add(asking([5], max_tokens=9, eos=(7,)))
    step(engine, token_ids=[[3, 7, 8, 9, 1]], logprobs={0: entries(3, 7, 8, 9, 1)})
    (output,) = engine.scheduler.take_outputs()
    assert (output.token_ids, output.logprobs, output.finish_reason) == ([3, 7], entries(3, 7), FinishReason.EOS)


def test_those_of_the_prompt_come_chunk_by_chunk_before_the_first_token() -> None:
    """Nobody holds those of a long prompt until all of them are there (C8)."""
    engine = Engine(scheduling_policy="chunked", max_prefill_chunk=2)
    engine.scheduler.add(asking([5, 6, 7, 8, 9]))
    step(engine, prompt_logprobs={0: entries(6, 7)})
    step(engine, prompt_logprobs={0: entries(8, 9)})
    step(engine, token_ids=[[3]])
    outputs = engine.scheduler.take_outputs()
    assert [(o.prompt_logprobs_offset, o.prompt_logprobs, o.token_ids) for o in outputs] == [
        (0, entries(6, 7), []),
        (2, entries(8, 9), []),
        (0, None, [3]),
    ]


def test_those_of_the_prompt_come_once_though_it_is_computed_again() -> None:
    engine = Engine(scheduling_policy="chunked", max_prefill_chunk=3)
    seq = asking([5, 6, 7, 8, 9])
    engine.scheduler.add(seq)
    step(engine, prompt_logprobs={0: entries(6, 7, 8)})
    engine.scheduler._state.preempt(seq)
    step(engine, prompt_logprobs={0: entries(6, 7, 8)})
    step(engine, token_ids=[[3]], prompt_logprobs={0: entries(9)})
    outputs = engine.scheduler.take_outputs()
    assert [(o.prompt_logprobs_offset, o.prompt_logprobs) for o in outputs] == [
        (0, entries(6, 7, 8)),
        (3, entries(9)),
        (0, None),
    ]


def test_a_prompt_of_one_token_has_none() -> None:
    engine = Engine()
    engine.scheduler.add(asking([5]))
    step(engine, token_ids=[[3]])
    assert engine.scheduler.take_outputs()[0].prompt_logprobs is None


def test_a_request_whose_rules_leave_no_token_is_to_blame() -> None:
    engine = Engine()
    engine.scheduler.add(asking([5, 6]))
    step(engine, errors={0: "why"}, unsatisfiable_rows=[0])
    (output,) = engine.scheduler.take_outputs()
    assert (output.finish_reason, output.detail, output.is_request_fault) == (FinishReason.ERROR, "why", True)


def test_early_endings_are_told_while_they_matter() -> None:
    engine = Engine()
    engine.scheduler.add(make_sequence(1, [5, 6], 9, eos=(7,), stop_ids=(8,), min_tokens=3))
    (bound,) = step(engine, token_ids=[[3]])
    assert (bound.min_length, sorted(bound.ending_token_ids)) == (5, [7, 8])
    late = make_sequence(2, [5, 6], 9, output=[1, 2, 3], eos=(7,), min_tokens=3)  # resumed after its third token
    other = Engine()
    other.scheduler.add(late)
    (bound,) = step(other, token_ids=[[3]])
    assert bound.ending_token_ids == ()
