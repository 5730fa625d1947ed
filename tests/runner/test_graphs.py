"""Graphs: what is replayed equals what is run, and which steps are replayed."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.fakes.graphs import RecordedGraphs
from tests.runner.conftest import greedy_reference, make_driver, random_prompt
from worker.core.params import SamplingParams
from worker.runner import graphs as module
from worker.runner.graphs import GraphSizes
from worker.runner.model_runner import OUT_OF_MEMORY

pytestmark = pytest.mark.usefixtures("inference_mode")


def test_sizes_end_with_the_largest_step_of_uniform_rows() -> None:
    assert GraphSizes.up_to(1, 16) == GraphSizes((1,), (8, 16))
    assert GraphSizes.up_to(24, 100) == GraphSizes((1, 2, 4, 8, 16, 24), (8, 16, 32, 64))
    assert GraphSizes.up_to(100, 7).rows[-3:] == (64, 96, 100)
    assert GraphSizes.up_to(256, 4096).largest() == GraphSizes((256,), (1024,))


def test_pieces_replayed_between_the_cache_layers_give_the_same_tokens(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    path, model = tiny
    driver = make_driver(path, kernel_backend="torch")  # what is recorded are torch's operations
    graphs = RecordedGraphs()
    driver.runner.capture(GraphSizes(tokens=(8, 32)), graphs)
    assert len(graphs.graphs) == 2 * (3 + 1)  # three layers are the cuts
    seqs = [driver.add(random_prompt(n, n)) for n in (3, 20, 9)]
    driver.prefill(seqs[1])  # 20 tokens, padded to 32
    driver.run([(seqs[1], 1), (seqs[0], 3), (seqs[2], 4)])  # a decode row and two chunks
    driver.run([(seqs[2], 5), (seqs[0], 1), (seqs[1], 1)])
    driver.decode(*seqs, steps=9)
    assert [graph.num_replays for graph in graphs.graphs] == [1] * 4 + [11] * 4
    driver.prefill(other := driver.add(random_prompt(33, 1)))  # larger than any graph
    assert [graph.num_replays for graph in graphs.graphs] == [1] * 4 + [11] * 4
    for seq in [*seqs, other]:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], len(seq.output))


def test_large_pieces_compute_the_last_layer_of_few_tokens(
    tiny: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MANY_TOKENS", 8)
    monkeypatch.setattr(module, "MAX_WANTED", 2)
    path, model = tiny
    driver = make_driver(path, kernel_backend="torch")
    graphs = RecordedGraphs()
    driver.runner.capture(GraphSizes(tokens=(8, 16, 32)), graphs)
    seqs = [driver.add(random_prompt(n, n)) for n in (12, 20, 9, 5)]
    asking = driver.add(random_prompt(9, 3), SamplingParams(temperature=0.0, num_prompt_logprobs=0))
    driver.prefill(*seqs[:2])
    driver.run([(seqs[2], 9)])  # fewer tokens, of fewer
    driver.run([(seqs[2], 1), (seqs[0], 1)])
    driver.run([(seqs[3], 1), (seqs[0], 1)])
    assert [graph.num_replays for graph in graphs.graphs] == [1] * 4 + [1] * 4 + [2] * 4
    driver.run([(seqs[3], 4), (asking, 9)])  # all tokens are wanted
    driver.run([(seqs[2], 1), (seqs[3], 1), (driver.add(random_prompt(20, 9)), 8)])  # three tokens are
    assert [graph.num_replays for graph in graphs.graphs] == [1] * 4 + [1] * 4 + [2] * 4
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], len(seq.output))


def test_out_of_memory_ends_the_requests_of_the_step_alone(
    tiny: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tiny
    driver = make_driver(path)
    seqs = [driver.add(random_prompt(n, n)) for n in (3, 20, 9)]
    driver.prefill(*seqs)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(driver.runner._parts.forward, "run", fail)
        output = driver.run([(seqs[0], 1), (seqs[1], 1)])
    assert output.errors == {0: OUT_OF_MEMORY, 1: OUT_OF_MEMORY}
    assert output.token_ids == [[], []]
    driver.decode(seqs[2], steps=5)
    assert seqs[2].output == greedy_reference(model, seqs[2].tokens[:9], 6)
