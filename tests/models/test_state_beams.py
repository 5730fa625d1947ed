"""Beam search of a model with recurrent state, whose beams go their ways from copies of it."""

from pathlib import Path

from tests.engine.loop import Loop, make_sequence
from tests.models.cases import VOCABULARY, all_cases
from tests.models.saved import Saved, save
from tests.runner.conftest import make_driver, random_prompt
from worker.core.beam import BeamSearch, Hypothesis
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.params import BeamParams, StopConditions

BEAM, STOP, NUM_TOKENS = BeamParams(width=3), StopConditions(max_tokens=6), 6


def reference(saved: Saved, prompt: list[int]) -> list[Hypothesis]:
    """From the logits of `transformers`, each beam as a text of its own."""
    search = BeamSearch(BEAM, STOP, len(prompt), len(prompt) + NUM_TOKENS)
    beams = [prompt]
    while beams:
        best = [saved.logits(beam)[-1].float().log_softmax(-1).topk(search.num_candidates) for beam in beams]
        candidates = [list(zip(one.indices.tolist(), one.values.tolist(), strict=True)) for one in best]
        beams = [[*beams[beam.parent], beam.token] for beam in search.advance(beams, candidates)]
    return search.hypotheses


def test_hypotheses_equal_those_from_the_logits_of_transformers(tmp_path: Path) -> None:
    saved = save(all_cases()["qwen3-next"], tmp_path)
    driver = make_driver(saved.path, num_blocks=32, max_num_seqs=5)
    scheduler = SchedulerConfig(max_model_len=256, max_num_seqs=5, max_num_batched_tokens=64)
    cache = CacheConfig(block_size=16, num_blocks=32, num_groups=driver.num_groups, enable_prefix_caching=False)
    loop = Loop(driver.runner, scheduler, cache)
    prompt = random_prompt(19, 3, VOCABULARY)
    loop.run(make_sequence(1, prompt, NUM_TOKENS, beam=BEAM), make_sequence(2, prompt[:5], 9))
    found, expected = loop.ended[1].hypotheses, reference(saved, prompt)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
