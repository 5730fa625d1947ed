"""Greedy steps of a CPU find their tokens without logits; whoever asks for more than tokens gets logits."""

from pathlib import Path

import pytest
import torch

from tests.runner.conftest import make_driver, random_prompt, save_llama
from tests.runner.driver import Driver, Seq
from worker.core.params import SamplingParams
from worker.kernels.native.library import obstacle
from worker.layers.embedding import OutputHead
from worker.runner.graphs import CapturedLogits

pytestmark = pytest.mark.skipif(obstacle() is not None, reason="needs AVX2 and a C++ compiler")
GREEDY = SamplingParams(temperature=0.0)
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How logits were made, once for each time."""
    times: list[str] = []

    def noted(kind: type, name: str) -> None:
        made_by = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *given: (times.append(name), made_by(*given))[1])

    noted(OutputHead, "forward")
    noted(CapturedLogits, "compute")
    return times


def texts(driver: Driver, num_seqs: int = 5) -> list[Seq]:
    """Prompts alone, rows that decode, and both in one step, one of them a prompt that goes on."""
    *seqs, last, part = [driver.add(random_prompt(3 + 5 * n, n), GREEDY) for n in range(num_seqs)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=4)
    driver.run([(part, 7), *((seq, 1) for seq in seqs), (last, len(last.tokens))])
    driver.run([*((seq, 1) for seq in [*seqs, last]), (part, len(part.tokens) - 7)])
    driver.decode(*seqs, last, part, steps=5)
    return [*seqs, last, part]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_tokens_are_those_of_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[str], eager: bool, quantization: str, is_tied: bool
) -> None:
    save_llama(tmp_path, **SHAPE, tie_word_embeddings=is_tied)
    driver = make_driver(tmp_path, enforce_eager=eager, quantization=quantization)
    made.clear()  # what was recorded
    found = texts(driver)
    assert made == []
    monkeypatch.setattr(OutputHead, "finder", lambda _: None)
    chosen = texts(make_driver(tmp_path, enforce_eager=eager, quantization=quantization))
    assert made != []
    assert [seq.tokens for seq in found] == [seq.tokens for seq in chosen]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "asking",
    [
        SamplingParams(temperature=0.7, seed=1), SamplingParams(temperature=0.0, num_logprobs=0),
        SamplingParams(temperature=0.0, presence_penalty=1.0), SamplingParams(temperature=0.0, logit_bias=((3, 1.0),)),
        SamplingParams(temperature=0.0, allowed_token_ids=(3, 4)),
    ],
)  # fmt: skip
def test_steps_with_a_row_that_asks_for_more_have_logits(
    tmp_path: Path, made: list[str], eager: bool, asking: SamplingParams
) -> None:
    save_llama(tmp_path, **SHAPE)
    driver = make_driver(tmp_path, enforce_eager=eager)
    plain, other = driver.add(random_prompt(9, 1), GREEDY), driver.add(random_prompt(9, 2), asking)
    made.clear()
    driver.prefill(plain, other)
    driver.decode(plain, other, steps=3)
    kind = "forward" if eager else "compute"
    assert made == ["forward", kind, kind, kind]
    driver.decode(plain, steps=3)
    assert len(made) == 4


def test_beams_have_logits(tmp_path: Path, made: list[str]) -> None:
    save_llama(tmp_path, **SHAPE)
    driver = make_driver(tmp_path)
    seq = driver.add(random_prompt(9, 1), GREEDY)
    made.clear()
    driver.run([(seq, 9)], beam_rows=[0], num_candidates=4)
    driver.run([(seq, 1)], beam_rows=[0], num_candidates=4)
    assert made == ["forward", "compute"]


def test_capped_logits_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap may make large ones equal: the first of those is the token."""
    save_llama(tmp_path, **SHAPE)
    head = make_driver(tmp_path).runner._model.output_head()
    assert head is not None and head.finder() is not None
    monkeypatch.setattr(head, "_soft_cap", 30.0)
    assert head.finder() is None


def test_a_row_that_is_not_finite_fails_alone(tmp_path: Path, made: list[str]) -> None:
    save_llama(tmp_path, **SHAPE)
    driver = make_driver(tmp_path, enforce_eager=True)
    good, bad = driver.add(random_prompt(3, 1)), driver.add(random_prompt(3, 2))
    driver.prefill(good, bad)
    embedding = driver.runner._model.model.embed_tokens
    rows, bad_token = embedding.forward, bad.tokens[-1]
    assert bad_token != good.tokens[-1]
    embedding.forward = lambda ids: rows(ids).masked_fill((ids == bad_token)[:, None], torch.nan)
    driver.decode(good, bad)
    assert bad.error is not None and good.error is None
    assert made == []
