"""Tiny random Llamas saved by transformers, and runners over them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.runner.driver import Driver
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

TINY = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "eos_token_id": [2, 5],
    "bos_token_id": 1,
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def inference_mode() -> Iterator[None]:
    """For tests that write to cache tensors, which belong to it."""
    with torch.inference_mode():
        yield


@pytest.fixture
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def save_llama(path: Path, **changes: object) -> LlamaForCausalLM:
    """Save a random model with a fixed seed; returns it for reference."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(TINY | changes))).float().eval()
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("tiny-llama")
    return path, save_llama(path)


def make_driver(model: Path | str, **options: object) -> Driver:
    defaults: dict[str, object] = {
        "model": str(model), "device": "cpu", "num_blocks": 64, "max_num_seqs": 16, "quantization": "none",
    }  # fmt: skip
    config = RunnerConfig(**(defaults | options))  # type: ignore[arg-type]
    runner, info = build_runner(config, Group())
    return Driver(runner, info.num_blocks, info.block_size, info.num_groups)


@pytest.fixture
def driver_for() -> Callable[..., Driver]:
    return make_driver


def greedy_reference(model: LlamaForCausalLM, prompt: list[int], steps: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def random_prompt(length: int, seed: int, vocab_size: int = TINY["vocab_size"]) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()
