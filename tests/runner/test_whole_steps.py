"""Which steps are asked for as one graph; what such graphs give is tested on a GPU."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.runner.conftest import greedy_reference, make_driver, random_prompt
from worker.core.batch import ScheduledBatch
from worker.core.params import SamplingParams
from worker.core.tokens import token_array
from worker.runner.forward import ForwardPass
from worker.runner.graphs import WHOLE_ROWS, Take
from worker.runner.timer import CpuTiming

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, longest context) of each such step."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(ForwardPass, "whole_rows", WHOLE_ROWS)
    monkeypatch.setattr(ForwardPass, "next_take", lambda _, rows, longest: found.append((rows, longest)))
    return found


def test_steps_of_the_same_greedy_rows_without_news(
    tiny: tuple[Path, LlamaForCausalLM], asked: list[tuple[int, int]]
) -> None:
    path, model = tiny
    driver = make_driver(path, kernel_backend="torch", block_size=16)
    first, second = driver.add(random_prompt(12, 1)), driver.add(random_prompt(5, 2))
    driver.prefill(first)
    driver.decode(first)
    assert asked == []  # its slot has to be sent
    driver.decode(first, steps=4)
    assert asked == [(1, 14), (1, 15), (1, 16)]  # a step with a new block is none
    driver.prefill(second)
    driver.decode(second, first)
    driver.decode(second, first, steps=2)
    assert asked[3:] == [(2, 19), (2, 20)]
    driver.decode(first, second)  # in another order
    assert len(asked) == 5
    for seq in (first, second):
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], len(seq.output))


def test_no_steps_that_ask_for_more(tiny: tuple[Path, LlamaForCausalLM], asked: list[tuple[int, int]]) -> None:
    driver = make_driver(tiny[0], kernel_backend="torch", block_size=16, max_num_seqs=8)
    drawn = driver.add(random_prompt(3, 1), SamplingParams(temperature=0.8, seed=1))
    biased = driver.add(random_prompt(3, 2), SamplingParams(temperature=0.0, logit_bias=((3, 1.0),)))
    telling = driver.add(random_prompt(3, 3), SamplingParams(temperature=0.0, num_logprobs=1))
    plain = [driver.add(random_prompt(3, 4 + i)) for i in range(5)]
    driver.prefill(drawn, biased, telling, *plain)
    for rows in ([drawn], [biased], [telling], [plain[0], drawn], plain):
        driver.decode(*rows, steps=3)
    assert asked == []
    driver.decode(plain[0], steps=2)
    assert asked == [(1, 11)]
    driver.run([(plain[0], 1)], beam_rows=[0], num_candidates=2)
    driver.run([(plain[0], 1)], is_dummy=True)
    assert len(asked) == 1


def test_nothing_is_asked_where_no_step_is_one_graph(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0])
    assert driver.runner._parts.forward.whole_rows == 0


def test_a_take_is_not_replayed_before_its_tokens_are_read() -> None:
    class Counted:
        num_replays = 0

        def capture_end(self) -> None: ...

        def replay(self) -> None:
            self.num_replays += 1

    graph = Counted()
    take = Take(graph, CpuTiming(), torch.tensor([7, 8]))
    batch = ScheduledBatch(0, [3], [1], [5], token_array([-1]), [True])
    assert take.is_free
    pending = take.start(batch)
    assert graph.num_replays == 1 and not take.is_free
    assert pending.result().token_ids == [[7]]
    assert take.is_free
