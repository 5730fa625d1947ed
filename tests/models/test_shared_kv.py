"""Layers that see the keys and values of earlier ones have no cache."""

from pathlib import Path

from tests.models.cases import all_cases
from tests.models.saved import save
from tests.runner.conftest import make_driver
from worker.layers.attention import SharedAttention


def test_two_of_four_layers_have_caches(tmp_path: Path) -> None:
    runner = make_driver(save(all_cases()["gemma4"], tmp_path).path).runner
    assert [module.owns_cache for module in runner._model.cache_layers()] == [True, True]
    assert sum(isinstance(module, SharedAttention) for module in runner._model.modules()) == 2
    block = {spec.bytes_per_entry for builder in runner._parts.builders for spec in builder.pool_specs()}
    keys_and_values, kv_heads, block_size = 2, 2, 16
    assert block == {4 * keys_and_values * kv_heads * block_size * dim for dim in (16, 32)}
