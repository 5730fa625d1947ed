"""Layers that see the keys and values of earlier ones: they have no cache, and graphs of pieces end at them, too."""

import pytest
import torch

from tests.fakes.graphs import RecordedGraphs
from tests.models.cases import VOCABULARY, all_cases
from tests.models.saved import Saved, save
from tests.runner.conftest import make_driver, random_prompt
from worker.layers.attention import SharedAttention
from worker.runner.graphs import GraphSizes


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(all_cases()["gemma4"], tmp_path_factory.mktemp("gemma4"))


def test_two_of_four_layers_have_caches(gemma4: Saved) -> None:
    runner = make_driver(gemma4.path).runner
    assert [layer.owns_cache for layer in runner._model.cache_layers()] == [True, True]
    assert sum(isinstance(module, SharedAttention) for module in runner._model.modules()) == 2
    block = {spec.bytes_per_entry for builder in runner._parts.builders for spec in builder.pool_specs()}
    keys_and_values, kv_heads, block_size = 2, 2, 16
    assert block == {4 * keys_and_values * kv_heads * block_size * dim for dim in (16, 32)}


def test_pieces_replayed_between_all_four_give_the_same_tokens(gemma4: Saved) -> None:
    driver = make_driver(gemma4.path, kernel_backend="torch")
    graphs = RecordedGraphs()
    with torch.inference_mode():
        driver.runner.capture(GraphSizes(tokens=(8, 32)), graphs)
        assert len(graphs.graphs) == 2 * (4 + 1)
        seqs = [driver.add(random_prompt(n, n, VOCABULARY)) for n in (3, 20, 9)]
        driver.prefill(seqs[1])
        driver.run([(seqs[1], 1), (seqs[0], 3), (seqs[2], 4)])
        driver.run([(seqs[2], 5), (seqs[0], 1), (seqs[1], 1)])
        driver.decode(*seqs, steps=9)
        assert [graph.num_replays for graph in graphs.graphs] == [1] * 5 + [11] * 5
    for seq in seqs:
        gemma4.assert_greedy(seq.tokens[: seq.num_prompt], seq.output)


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}])
def test_keys_written_over_themselves_stay_what_they_are(gemma4: Saved, options: dict[str, str]) -> None:
    """Rounded ones, too: however a prompt is cut up, its continuation is the same."""
    driver = make_driver(gemma4.path, **options)
    whole, parts = (driver.add(random_prompt(41, 1, VOCABULARY)) for _ in range(2))
    driver.prefill(whole)
    driver.run([(parts, 10)])
    driver.run([(parts, 31)])
    driver.decode(whole, parts, steps=15)
    assert whole.output == parts.output
