"""Checkpoints hold more than a model uses: what is known to be no part of it is skipped by name, all else refused."""

import json
import logging
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.models.cases import all_cases
from tests.models.saved import Saved, save
from tests.runner.conftest import make_driver
from worker.loader.errors import WeightsError

PROMPT = [5, 17, 3, 60]


@pytest.fixture(scope="module", params=["deepseek-v3", "glm4-moe"])
def with_mtp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """With a layer behind the model's own, and others under names of their own."""
    saved = save(all_cases()[request.param], tmp_path_factory.mktemp("mtp"))
    file = saved.path / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((saved.path / "config.json").read_text())
    first, last = (f"model.layers.{config['num_hidden_layers'] + i}." for i in (0, -1))
    more = {name.replace(last, first): value + 1 for name, value in tensors.items() if name.startswith(last)}
    more[f"{first}eh_proj.weight"] = tensors["lm_head.weight"]
    for name in ("mtp.0.norm.weight", "model.mtp.layers.0.norm.weight"):
        more[name] = tensors["model.norm.weight"]
    save_file(tensors | {name: value.clone() for name, value in more.items()}, file)
    return saved


def test_layers_that_predict_further_tokens_are_skipped(with_mtp: Saved, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "worker.loader.model_part"):
        driver = make_driver(with_mtp.path)
    assert "tensors of the checkpoint are not used: model.layers." in caplog.text
    seq = driver.add(PROMPT)
    driver.prefill(seq)
    driver.decode(seq, steps=7)
    with_mtp.assert_greedy(PROMPT, seq.output)


def test_layers_beyond_those_that_are_counted_are_refused(with_mtp: Saved, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(with_mtp.path / "model.safetensors")
    config = json.loads((with_mtp.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(WeightsError, match=rf"unexpected: model\.layers\.{config['num_hidden_layers']}\."):
        make_driver(tmp_path)


@pytest.mark.parametrize(("case", "first"), [("kimi-k2.5", "mm_projector."), ("gemma4-vision", "model.embed_vision.")])
def test_a_vision_tower_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, first: str) -> None:
    saved = save(all_cases()[case], tmp_path)
    with caplog.at_level(logging.INFO, "worker.loader.model_part"):
        make_driver(saved.path)
    assert f"tensors of the checkpoint are not used: {first}" in caplog.text and "vision_tower." in caplog.text


def test_two_tensors_for_one_of_the_models_are_refused(tmp_path: Path) -> None:
    """`transformers` calls Kimi's layers blocks where it saves them, publishers do not; nobody does both."""
    saved = save(all_cases()["kimi-k2.5"], tmp_path)
    tensors = load_file(saved.path / "model.safetensors")
    name = "language_model.model.blocks.1.input_layernorm.weight"
    tensors[name.replace("blocks", "layers")] = tensors[name] + 1
    save_file(tensors, saved.path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"are both model\.layers\.1\.input_layernorm\.weight of the model"):
        make_driver(saved.path)
