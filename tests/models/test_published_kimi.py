"""Kimi-K2.5 in the form in which it is published, which `transformers` reads and does not write: layers that are called
layers, experts of 4 bits, and their description inside of `text_config`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.cases import VOCABULARY, all_cases
from tests.models.saved import Saved, save
from tests.runner.conftest import make_driver, random_prompt
from tests.runner.logits import capture_logits
from tests.runner.quantized_files import packed
from tests.runner.test_nested_config import INT4

GROUP = 16


@pytest.fixture
def published(tmp_path: Path) -> Saved:
    saved = save(all_cases()["kimi-k2.5"], tmp_path)
    tensors, experts = {}, saved.model.model.language_model.layers[1].mlp.experts
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
        *module, number, projection, part = name.split(".")
        if "experts" not in module:
            tensors[name] = tensor
            continue
        made, exact = packed(tensor, GROUP)
        tensors |= {name.removesuffix(part) + made_part: value for made_part, value in made.items()}
        inner = tensor.shape[1 if projection == "down_proj" else 0]
        into = {
            "gate_proj": experts.gate_up_proj[int(number), :inner],
            "up_proj": experts.gate_up_proj[int(number), inner:],
            "down_proj": experts.down_proj[int(number)],
        }
        with torch.no_grad():
            into[projection].copy_(exact)
    save_file(tensors, tmp_path / "model.safetensors")
    section = json.loads(json.dumps(INT4))
    section["config_groups"]["group_0"]["weights"]["group_size"] = GROUP
    change(tmp_path, lambda config: config["text_config"].update(quantization_config=section, model_type="kimi_k2"))
    return saved


def change(path: Path, what: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    what(config)
    (path / "config.json").write_text(json.dumps(config))


def test_it_computes_what_its_numbers_mean(published: Saved) -> None:
    driver = make_driver(published.path)
    seen = capture_logits(driver)
    seq = driver.add(random_prompt(20, 1, VOCABULARY))
    driver.prefill(seq)
    published.assert_logits(seen[0], seq.tokens[:20], 19)
    driver.decode(seq, steps=15)
    published.assert_greedy(seq.tokens[:20], seq.output)


def test_a_head_that_differs_counts_where_the_file_does_not_say(published: Saved) -> None:
    """Without the field embedding and head would be one."""
    change(published.path, lambda config: config.pop("tie_word_embeddings"))
    driver = make_driver(published.path)
    driver.prefill(seq := driver.add(random_prompt(20, 1, VOCABULARY)))
    published.assert_greedy(seq.tokens[:20], seq.output)
