"""All layers in one call of C++, against `transformers` and against itself: biases, long steps, blocks of any kind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.kernels.levels import at_level
from tests.runner.conftest import greedy_reference, make_driver, random_prompt, save_llama
from worker.kernels.native.build import LEVELS
from worker.kernels.native.decoder import NativeDecoder
from worker.kernels.native.library import obstacle
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

pytestmark = pytest.mark.skipif(obstacle() is not None, reason="needs AVX2 and a C++ compiler")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """Heads of whole vectors, inner features of whole panels, and biases everywhere."""
    path = tmp_path_factory.mktemp("wide-llama")
    model = save_llama(
        path, hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
        attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(path)
    return path, model


def test_the_kernel_is_taken(wide: tuple[Path, LlamaForCausalLM]) -> None:
    _, info = build_runner(RunnerConfig(model=str(wide[0]), device="cpu", num_blocks=8, max_num_seqs=2), Group())
    assert info.kernels["decoder"] == "native"


def test_greedy_tokens_equal_transformers(wide: tuple[Path, LlamaForCausalLM]) -> None:
    path, model = wide
    driver = make_driver(path)
    seqs = [driver.add(random_prompt(n, n)) for n in (1, 5, 33, 70)]
    driver.prefill(*seqs[:3])
    driver.run([(seqs[0], 1), (seqs[3], 30), (seqs[1], 1)])
    driver.prefill(seqs[3])
    driver.decode(*seqs, steps=40)
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], len(seq.output))


def test_a_hidden_size_that_leaves_a_panel_half_empty(tmp_path: Path) -> None:
    model = save_llama(tmp_path, hidden_size=72, intermediate_size=96, head_dim=16, num_attention_heads=4)
    driver = make_driver(tmp_path)
    seqs = [driver.add(random_prompt(n, n)) for n in (3, 40)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=10)
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], len(seq.output))


def test_a_step_of_more_tokens_than_go_through_the_layers_together(wide: tuple[Path, LlamaForCausalLM]) -> None:
    """1,024 do; one row is cut there."""
    path, model = wide
    driver = make_driver(path, num_blocks=128)
    seqs = [driver.add(random_prompt(100, seed)) for seed in range(12)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=3)
    for seq in seqs[9:]:
        assert seq.output == greedy_reference(model, seq.tokens[:100], 4)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(("num_layers", "head_dim"), [(1, 16), (3, 16), (3, 32)])
def test_tokens_that_are_wanted_are_as_if_all_were(
    quantization: str, num_layers: int, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends of long and short chunks, rows that decode, rows cut where a step is, and none of a step's first 1,024.

    Heads of 32 are rounded by attention, others before the product.
    """
    save_llama(
        tmp_path, hidden_size=64, intermediate_size=96, head_dim=head_dim, num_attention_heads=4,
        num_hidden_layers=num_layers, max_position_embeddings=2048,
    )  # fmt: skip
    num_wanted = []
    compute = NativeDecoder.__call__

    def compare(self: NativeDecoder, x: Tensor, bound: Any, metadata: Any, wanted: Tensor | None = None) -> Tensor:
        if wanted is None:
            return compute(self, x, bound, metadata)
        expected = compute(self, x.clone(), bound, metadata)[wanted]
        got = compute(self, x, bound, metadata, wanted)
        num_wanted.append(len(wanted))
        assert torch.equal(got, expected)
        return got

    monkeypatch.setattr(NativeDecoder, "__call__", compare)
    driver = make_driver(tmp_path, num_blocks=128, quantization=quantization)
    seqs = [driver.add(random_prompt(n, n)) for n in (1, 5, 33, 300, 70, 1100)]
    driver.prefill(*seqs[:2])
    driver.run([(seqs[0], 1), (seqs[3], 130), (seqs[2], 33), (seqs[1], 1), (seqs[4], 3)])
    driver.run([(seqs[0], 1), (seqs[3], 170), (seqs[4], 67)])
    driver.prefill(seqs[5])
    assert num_wanted == [2, 5, 3, 1]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_row_is_the_same_alone_and_in_any_batch(wide: tuple[Path, LlamaForCausalLM], quantization: str) -> None:
    prompts = [random_prompt(n, n) for n in (3, 40, 17)]
    together = make_driver(wide[0], quantization=quantization)
    seqs = [together.add(prompt) for prompt in prompts]
    together.prefill(*seqs)
    together.decode(*seqs, steps=20)
    for seq, prompt in zip(seqs, prompts, strict=True):
        driver = make_driver(wide[0], quantization=quantization)
        alone = driver.add(prompt)
        driver.prefill(alone)
        driver.decode(alone, steps=20)
        assert alone.output == seq.output


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_oldest_level_computes_the_same(
    wide: tuple[Path, LlamaForCausalLM], quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its panels are half a block of a row. Steps of fewer rows than are rounded together, and of more. With a cache of
    floats: what is multiplied in pairs of bfloat16 is rounded otherwise, and 8 bits would show it tenfold."""
    found: list[Tensor] = []
    compute = NativeDecoder.__call__

    def keep(self: NativeDecoder, x: Tensor, bound: Any, metadata: Any, wanted: Tensor | None = None) -> Tensor:
        out = compute(self, x, bound, metadata, wanted)
        if wanted is not None:
            found.append(out.clone())
        return out

    def prefill() -> Tensor:
        found.clear()
        driver = make_driver(wide[0], quantization=quantization, kv_cache_dtype="activations")
        for lengths in ((3,), (2, 5), (40, 9)):
            driver.prefill(*(driver.add(random_prompt(length, length)) for length in lengths))
        assert [len(out) for out in found] == [1, 2, 2]
        return torch.cat(found)

    monkeypatch.setattr(NativeDecoder, "__call__", keep)
    newest = prefill()
    with at_level(LEVELS[-1]):
        oldest = prefill()
    torch.testing.assert_close(oldest, newest, atol=1e-4 if quantization == "none" else 0.02, rtol=0)
