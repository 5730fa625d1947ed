"""Checkpoints have three tensors of each expert, or one of all gates and ups and one of all downs; names tell which."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models.cases import all_cases
from tests.models.saved import save
from tests.runner.conftest import make_driver

PROMPT = [5, 17, 3, 60]


def test_experts_are_found_in_either_form(tmp_path: Path) -> None:
    saved = save(all_cases()["qwen3.5-moe"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        path = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([tensors.pop(f"{path}.{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{path}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        tensors[f"{path}.down_proj"] = parts["down"]
    save_file(tensors, tmp_path / "model.safetensors")
    driver = make_driver(tmp_path)
    seq = driver.add(PROMPT)
    driver.prefill(seq)
    driver.decode(seq, steps=7)
    saved.assert_greedy(PROMPT, seq.output)
