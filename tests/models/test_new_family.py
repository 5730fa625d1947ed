"""A family that nobody knew: one file brings its configuration and its model, and a line in each table names them. Its
attention sees a window in every other layer."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.models.cases import SMALL
from tests.runner.conftest import make_driver, random_prompt
from worker.layers.blocks import DecoderLayer, GatedMLP, SelfAttention
from worker.layers.decoder import Decoder
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.config import ModelConfig
from worker.loader.errors import ModelConfigError
from worker.loader.families.dense import dense_config, extended
from worker.loader.families.registry import FAMILIES
from worker.loader.fields import Fields
from worker.loader.hf_config import config_from_hf
from worker.models.dense import DecoderForCausalLM, attention_shape
from worker.models.registry import MODELS

NAME = "NobodyForCausalLM"
CONFIG = SMALL | {"architectures": [NAME], "model_type": "nobody", "nobody_window": 8, "rms_norm_eps": 1e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class NobodyConfig(ModelConfig):
    nobody_window: int


def nobody_config(fields: Fields) -> NobodyConfig:
    base = dense_config(fields, NAME, "nobody")
    return extended(base, NobodyConfig, nobody_window=fields.integer("nobody_window"))


class NobodyForCausalLM(DecoderForCausalLM):
    def __init__(self, config: NobodyConfig, setup: LayerSetup) -> None:
        rope = rope_table(setup, config.rope, config.head_dim, config.max_model_len)
        layers = []
        for layer in range(config.num_layers):
            shape = replace(attention_shape(config, layer), window=config.nobody_window if layer % 2 else None)
            mlp = GatedMLP(setup, config.hidden_size, config.intermediate_size, activation="gelu_tanh")
            attention = SelfAttention(setup, shape, rope)
            layers.append(DecoderLayer(setup, attention, mlp, config.hidden_size, config.rms_norm_eps))
        super().__init__(
            config, setup, Decoder(setup, config.vocab_size, config.hidden_size, layers, config.rms_norm_eps)
        )


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, NAME, nobody_config)
    monkeypatch.setitem(MODELS, NAME, NobodyForCausalLM)


def test_it_loads_and_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    driver = make_driver(tmp_path, load_format="dummy")
    assert len(driver.runner._parts.builders) == 2, "one for layers with a window, one for those without"
    seqs = [driver.add(random_prompt(n, n, 99)) for n in (5, 21)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=7)
    assert [len(seq.output) for seq in seqs] == [8, 8]


def test_its_fields_are_checked_and_others_refused() -> None:
    with pytest.raises(ModelConfigError, match="nobody_window is 'wide'; a whole number"):
        config_from_hf(CONFIG | {"nobody_window": "wide"}, {})
    with pytest.raises(ModelConfigError, match="nobody_knows is 1; fields that are not known here"):
        config_from_hf(CONFIG | {"nobody_knows": 1}, {})
