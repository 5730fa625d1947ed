"""Beam search: the choice equals transformers', the scheduler's bookkeeping changes nothing about it."""

import pytest

from tests.core.builders import Engine, expected_hypotheses, make_sequence
from worker.core.beam import BeamSearch
from worker.core.params import BeamParams, StopConditions
from worker.core.stopping import FinishReason


@pytest.fixture(scope="module")
def tiny_model():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def search_with(model, prompt: list[int], search: BeamSearch) -> None:
    import torch

    beams = [prompt]
    while beams:
        with torch.no_grad():
            scores = model(torch.tensor(beams)).logits[:, -1].float().log_softmax(-1)
        best = scores.topk(min(search.num_candidates, scores.shape[1]))
        candidates = [
            list(zip(ids, values, strict=True))
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        beams = [[*beams[beam.parent], beam.token] for beam in search.advance(beams, candidates)]


@pytest.mark.parametrize(("width", "prompt"), [(1, [5, 6, 7]), (2, [1, 30, 12, 9]), (4, [5, 6, 7])])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5, 2.0])
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("eos", [(), (3,), (3, 17, 20)])
def test_hypotheses_equal_those_of_transformers(tiny_model, width, prompt, length_penalty, early_stopping, eos) -> None:
    import torch

    expected = tiny_model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=12,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=list(eos) or None,
        pad_token_id=39,
        return_dict_in_generate=True,
        output_scores=True,
    )
    stop = StopConditions(max_tokens=12, eos_token_ids=frozenset(eos))
    params = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    search = BeamSearch(params, stop, len(prompt), 64)
    search_with(tiny_model, prompt, search)
    rows = [row[len(prompt) :].tolist() for row in expected.sequences]
    assert len(search.hypotheses) == width
    for hypothesis, row in zip(search.hypotheses, rows, strict=True):
        assert row[: len(hypothesis.token_ids)] == hypothesis.token_ids
        assert set(row[len(hypothesis.token_ids) :]) <= {39}
    if width > 1:
        scores = [hypothesis.score for hypothesis in search.hypotheses]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
@pytest.mark.parametrize("prompt", [1, 16, 20])
def test_scheduler_finds_the_hypotheses_of_a_search_from_scratch(depth: int, policy: str, prompt: int) -> None:
    engine = Engine(async_depth=depth, scheduling_policy=policy)
    sequence = make_sequence(1, prompt, 20, eos=(0,), beam=BeamParams(width=3, length_penalty=0.7))
    wanted = expected_hypotheses(sequence, 256)
    engine.add(sequence)
    engine.run()
    ended = engine.ended[1]
    assert ended.hypotheses == wanted
    assert (ended.token_ids, ended.finish_reason) == (wanted[0].token_ids, wanted[0].finish_reason)
    engine.assert_drained()


def test_beam_rows_ask_for_candidates_and_never_defer() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 20, 5, beam=BeamParams(width=2)), make_sequence(2, 20, 5))
    first, second = engine.step(), engine.step()
    assert (first.beam_rows, first.num_candidates) == ([0], 4)
    assert second.beam_rows == [1, 2]
    assert min(second.input_ids) >= 0
    # Both go on from the shared prompt: one copies the partial block, the other may keep it.
    assert len(second.blocks_to_copy) == 1


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_abort_in_every_state_releases_all_beams(depth: int, num_steps: int) -> None:
    engine = Engine(async_depth=depth)
    engine.add(make_sequence(1, 20, 30, beam=BeamParams(width=4)))
    for _ in range(num_steps):
        engine.step()
    assert engine.scheduler.abort(1)
    engine.run()
    assert (engine.ended[1].finish_reason, engine.tokens[1]) == (FinishReason.ABORTED, [])
    assert len(engine.scheduler._state.holdings.free_slots) == 8
    engine.assert_drained()


def test_failed_beam_ends_the_search() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 20, 30, beam=BeamParams(width=2)))
    engine.step()
    engine.runner.failing_slots = {1}
    engine.step()
    assert engine.ended[1].finish_reason is FinishReason.ERROR
    engine.assert_drained()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_two_searches_that_do_not_fit_together_both_finish(mode: str) -> None:
    engine = Engine(num_blocks=9, num_host_blocks=4, preemption_mode=mode, async_depth=1)
    sequences = [make_sequence(id, 20, 25, beam=BeamParams(width=3)) for id in (1, 2)]
    wanted = {seq.id: expected_hypotheses(seq, 256) for seq in sequences}
    engine.add(*sequences)
    engine.run()
    assert {id: ended.hypotheses for id, ended in engine.ended.items()} == wanted
    assert engine.scheduler.load().num_preemptions
    engine.assert_drained()
