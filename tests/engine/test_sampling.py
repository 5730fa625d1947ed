"""Seeds, groups and beams through scheduler and runner together."""

import pytest
import torch

from tests.engine.conftest import PROMPTS
from tests.engine.loop import make_sequence
from worker.core.params import BeamParams, SamplingParams, StopConditions
from worker.core.stopping import FinishReason

HOT = [SamplingParams(temperature=1.0, seed=seed) for seed in range(6)]


def alone(tiny, prompt, sampling, num_tokens=16):
    return tiny.loop(16).run(make_sequence(0, prompt, num_tokens, sampling))[0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(tiny, mode, depth):
    """Cases 20 and 32."""
    queue = [make_sequence(i, PROMPTS[i], 16, sampling) for i, sampling in enumerate(HOT)]
    loop = tiny.loop(16, num_tokens_in_cache=96, preemption_mode=mode, async_depth=depth, watermark=0.0)
    tokens = loop.run(*queue)
    assert loop.scheduler.load().num_preemptions > 0
    assert tokens == {i: alone(tiny, PROMPTS[i], sampling) for i, sampling in enumerate(HOT)}


def group(prompt, size, num_tokens=12, first_id=1):
    return [
        make_sequence(first_id + i, prompt, num_tokens, HOT[i], parent_id=first_id if i else None, index=i)
        for i in range(size)
    ]


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("depth", [0, 1])
def test_members_of_a_group_are_what_they_are_alone(tiny, block_size, depth):
    prompt = PROMPTS[3]
    loop = tiny.loop(block_size, async_depth=depth)
    tokens = loop.run(group(prompt, 4))
    assert [tokens[1 + i] for i in range(4)] == [alone(tiny, prompt, HOT[i], 12) for i in range(4)]
    # The prompt once, its last token again for each of the other three, and eleven tokens of each.
    assert loop.num_scheduled_tokens == len(prompt) + 3 + 4 * 11


def reference_beams(model, prompt, beam, num_tokens, eos, min_tokens):
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=beam.width,
            num_return_sequences=beam.width,
            max_new_tokens=num_tokens,
            min_new_tokens=min_tokens,
            do_sample=False,
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
            eos_token_id=sorted(eos) or None,
            pad_token_id=130,
            return_dict_in_generate=True,
            output_scores=True,
        )
    tokens = [[token for token in row[len(prompt) :].tolist() if token != 130] for row in out.sequences]
    return tokens, out.sequences_scores.tolist()


def check_beams(tiny, prompt, beam, eos=frozenset(), min_tokens=0):
    """Returns our hypotheses."""
    loop = tiny.loop(16, prefix="hash")
    stop = StopConditions(max_tokens=10, min_tokens=min_tokens, eos_token_ids=eos)
    loop.run(make_sequence(7, prompt, 10, stop=stop, beam=beam))
    hypotheses = loop.ended[7].hypotheses
    tokens, scores = reference_beams(tiny.reference_model, prompt, beam, 10, eos, min_tokens)
    assert [hypothesis.token_ids for hypothesis in hypotheses] == tokens
    assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx(scores, abs=1e-4)
    return hypotheses


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", [False, True])
def test_beam_search_equals_transformers(tiny, width, length_penalty, early_stopping):
    """Without EOS, and with some of the tokens of that search as EOS, so that beams end in its midst."""
    beam = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    prompt = PROMPTS[3]
    unending, endings = check_beams(tiny, prompt, beam), set()
    for places in ((2,), (4, 7), (8,)):
        eos = frozenset(hypothesis.token_ids[place] for hypothesis in unending for place in places)
        endings |= {hypothesis.finish_reason for hypothesis in check_beams(tiny, prompt, beam, eos)}
    assert FinishReason.EOS in endings


@pytest.mark.parametrize("min_tokens", [3, 6, 10])
def test_no_beam_ends_before_min_tokens(tiny, min_tokens):
    beam = BeamParams(width=3)
    for prompt in (PROMPTS[1], PROMPTS[3]):
        unending = check_beams(tiny, prompt, beam)
        eos = frozenset(hypothesis.token_ids[place] for hypothesis in unending for place in (1, 2, 7))
        for hypothesis in check_beams(tiny, prompt, beam, eos, min_tokens):
            assert eos.isdisjoint(hypothesis.token_ids[:min_tokens])
