"""Tapes: steps of a CPU that are recorded give what others give, and what cannot be recorded runs as ever."""

from pathlib import Path

import pytest
import torch

from tests.runner.conftest import greedy_reference, make_driver, random_prompt, save_llama
from tests.runner.driver import Driver, Seq
from worker.core.params import SamplingParams
from worker.kernels.native.library import obstacle
from worker.kernels.native.tape import Tape, Tapes, UnrecordableError
from worker.kernels.select import Kernels
from worker.kernels.step import StepBuffers
from worker.models.base import CausalLM
from worker.parallel.group import Group
from worker.runner import build, model_runner
from worker.runner.greedy import GreedyChoices, choices_alone
from worker.runner.slots import SlotState

pytestmark = pytest.mark.skipif(obstacle() is not None, reason="needs AVX2 and a C++ compiler")
WHOLE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
"""A shape whose layers are one operation."""
ASKING = SamplingParams(temperature=0.8, top_p=0.9, seed=3, num_logprobs=2)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """That are recorded."""
    monkeypatch.setattr(build, "MOST_TAPED_ROWS", 8)


@pytest.fixture
def num_replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A single number."""
    count, replay = [0], Tape.replay

    def counted(tape: Tape) -> None:
        count[0] += 1
        replay(tape)

    monkeypatch.setattr(Tape, "replay", counted)
    return count


def decode(driver: Driver, *params: SamplingParams) -> list[Seq]:
    """Steps of one row to ten; the first rows are in most of them."""
    seqs = [driver.add(random_prompt(3 + 5 * n, n), sampling) for n, sampling in enumerate(params)]
    driver.prefill(*seqs)
    for num_rows in (1, 3, 10, 8, 2, 1, 10, 5):
        driver.decode(*seqs[:num_rows], steps=3)
    return seqs


def test_taped_steps_give_the_tokens_of_others(tmp_path: Path, num_replays: list[int]) -> None:
    model = save_llama(tmp_path, **WHOLE)
    seqs = decode(make_driver(tmp_path), *[SamplingParams(temperature=0.0)] * 10)
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], len(seq.output))
    assert num_replays == [2 * 6 * 3]  # layers and choice of all but those of ten rows


def test_logits_of_a_tape_are_sampled_by_any_rules(tmp_path: Path, num_replays: list[int]) -> None:
    save_llama(tmp_path, **WHOLE)
    params = [SamplingParams(temperature=0.0), ASKING, SamplingParams(temperature=0.0, frequency_penalty=1.0)] * 4
    taped, plain = (decode(make_driver(tmp_path, enforce_eager=eager), *params[:10]) for eager in (False, True))
    assert [seq.output for seq in taped] == [seq.output for seq in plain]
    assert num_replays == [2 * 6 * 3]  # logits in place of a choice but for one row alone


def test_ranks_that_choose_together_replay_the_head_that_they_need(
    tmp_path: Path, num_replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of up to two rows, here by one rank: hidden states, then either the choice or the logits."""

    def choices_of_one(
        kernels: Kernels, tp: Group, model: CausalLM, slots: SlotState, buffers: StepBuffers
    ) -> GreedyChoices:
        of_hidden = choices_alone(kernels, tp, model, slots, buffers).of_hidden
        return GreedyChoices(of_hidden=of_hidden, most_rows_of_hidden=2)

    save_llama(tmp_path, **WHOLE)
    params = [SamplingParams(temperature=0.0), ASKING] + [SamplingParams(temperature=0.0)] * 8
    plain = decode(make_driver(tmp_path, enforce_eager=True), *params)
    assert num_replays == [0]
    monkeypatch.setattr(model_runner, "choices_of_ranks", choices_of_one)
    taped = decode(make_driver(tmp_path), *params)
    assert [seq.output for seq in taped] == [seq.output for seq in plain]
    assert num_replays == [3 * 2 * 3 + 3 * 3]  # of one and two rows two tapes each


def test_no_tape_has_more_rows_than_there_are_slots(tmp_path: Path, num_replays: list[int]) -> None:
    model = save_llama(tmp_path, **WHOLE)
    driver = make_driver(tmp_path, max_num_seqs=2)
    seqs = [driver.add(random_prompt(n, n)) for n in (4, 30)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=5)
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], len(seq.output))
    assert num_replays == [2 * 5]


def test_a_model_with_work_of_torch_is_not_taped(tmp_path: Path, num_replays: list[int]) -> None:
    model = save_llama(tmp_path, **(WHOLE | {"intermediate_size": 80}))
    seqs = decode(make_driver(tmp_path), *[SamplingParams(temperature=0.0)] * 10)
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], len(seq.output))
    assert num_replays == [0]


def test_tapes_share_the_memory_of_what_they_leave() -> None:
    """Of the same type and hardly larger, each time for one tensor; not what a tape goes on to use."""
    tapes = Tapes()
    with tapes.recording():
        tape = tapes.begin()
        left, used = torch.empty(40, 6), torch.empty(40, 6)
        tape.capture_end()
        assert tapes.alias(left) is left
        tape = tapes.begin()
        whole, few, second = torch.empty(39, 6, dtype=torch.int32), torch.empty(19, 6), left.new_empty(30, 6)
        third = torch.empty_like(second)
        tape.capture_end()
    assert second.data_ptr() == left.data_ptr() and second.shape == (30, 6) and second.is_contiguous()
    assert not {x.data_ptr() for x in (whole, few, third)} & {left.data_ptr(), used.data_ptr()}


def test_recording_ends_with_what_cannot_be_recorded() -> None:
    tapes = Tapes()
    with pytest.raises(UnrecordableError, match="add"), tapes.recording():
        tapes.begin()
        torch.empty(4)[:2] + 1
    assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
