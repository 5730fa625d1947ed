"""GGUF files with experts, which are in one tensor, and of GLM-4.5 with the layer for multi-token prediction behind the
others. The names are those that the gguf package has for the tensors of Hugging Face's checkpoints."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import MODEL_ARCH, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.engine.loop import make_sequence
from tests.models.cases import VOCABULARY, all_cases
from tests.models.cases.qwen3_moe import QWEN3_MOE
from tests.models.draft_rig import NUM_TOKENS, PROMPTS, Watch, build, make_loop
from tests.models.mtp import FORMS, Mtp
from tests.models.saved import save
from tests.runner.conftest import make_driver, random_prompt
from tests.runner.gguf_files import write_metadata
from tests.runner.gguf_moe import gguf_tensors, glm_metadata, qwen3_metadata
from tests.runner.logits import capture_logits
from worker.core.model_drafter import ModelDrafter
from worker.loader.errors import ModelConfigError, WeightsError
from worker.loader.gguf.checkpoint import rows_of
from worker.loader.gguf.file import GGUFTensor


class Glm:
    """A tiny one with all that GLM-4.5 has, and the same in a GGUF file."""

    def __init__(self, case: str, folder: Path) -> None:
        self.saved = save(all_cases()[case], folder / "model")
        self.mtp = Mtp(self.saved, FORMS["glm4-moe"])
        self.path = folder / "a.gguf"
        self.metadata = glm_metadata(self.saved.model.config, 1)
        num_blocks = self.saved.model.config.num_hidden_layers + 1
        self.tensors = gguf_tensors(self.saved, MODEL_ARCH.GLM4_MOE, num_blocks)
        self.write(self.path)

    def write(self, path: Path, **changes: Any) -> None:
        write_metadata(path, self.metadata | changes, self.tensors, "glm4moe")


@pytest.fixture(scope="module", params=["glm4-moe", "glm4-moe-groups"])
def glm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Glm:
    return Glm(request.param, tmp_path_factory.mktemp("glm"))


def test_it_says_what_the_model_says_and_drafts_by_its_layer(glm: Glm, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(glm.path, quantization="none")
    plain = make_loop(built).run(*(make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)))
    for i, prompt in enumerate(PROMPTS):
        glm.saved.assert_greedy(prompt, plain[i])
    watch = Watch(glm.mtp, built[0], [[*prompt, *plain[i]] for i, prompt in enumerate(PROMPTS)])
    monkeypatch.setattr(built[0]._parts.drafting, "propose", watch.propose)
    loop = make_loop(built, drafter=ModelDrafter())
    assert loop.run(*(make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS))) == plain
    assert watch.num_compared > 40


@pytest.mark.parametrize("glm", ["glm4-moe"], indirect=True)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_gating_func", 1, "is 1; nothing but 2"),
        ("nextn_predict_layers", 4, "is 4; fewer than the 4 of block_count"),
        ("rope.dimension_count", 7, "is 7; an even share of the 16 of a head"),
        ("expert_group_count", 3, "is 3; a divisor of the 8 experts"),
        ("expert_used_count", 9, "is 9; a whole number from 1 to 8"),
        ("expert_group_scale", 0.5, "is 0.5; fields that are not known"),
        ("attention.sliding_window", 64, "is 64; nothing but 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    glm: Glm, tmp_path: Path, key: str, value: object, message: str
) -> None:
    glm.write(tmp_path / "b.gguf", **{f"glm4moe.{key}": value})
    with pytest.raises(ModelConfigError, match=re.escape(f"b.gguf: glm4moe.{key} {message}")):
        build(tmp_path / "b.gguf")


@pytest.mark.parametrize("glm", ["glm4-moe"], indirect=True)
def test_a_file_without_that_layer_has_no_drafts(glm: Glm, tmp_path: Path) -> None:
    """It is served, but not with `--speculative mtp`."""
    kept = {name: value for name, value in glm.tensors.items() if not name.startswith("blk.3.")}
    metadata = glm.metadata | {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": None}
    write_metadata(tmp_path / "b.gguf", metadata, kept, "glm4moe")
    build(tmp_path / "b.gguf", drafter=None, num_speculative_tokens=0)
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.3\.eh_proj\.weight"):
        build(tmp_path / "b.gguf")


def test_qwen3_with_experts(tmp_path: Path) -> None:
    saved = save(lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE)), tmp_path / "model")
    config = saved.model.config
    metadata = qwen3_metadata(saved.model)
    tensors = gguf_tensors(saved, MODEL_ARCH.QWEN3MOE, config.num_hidden_layers)
    write_metadata(tmp_path / "a.gguf", metadata, tensors, "qwen3moe")
    driver = make_driver(tmp_path / "a.gguf")
    seen = capture_logits(driver)
    seq = driver.add(random_prompt(30, 1, VOCABULARY))
    driver.prefill(seq)
    saved.assert_logits(seen[0][:1], seq.tokens[:-1], 29)
    write_metadata(tmp_path / "b.gguf", metadata | {"qwen3moe.expert_gating_func": 2}, tensors, "qwen3moe")
    with pytest.raises(ModelConfigError, match=r"qwen3moe\.expert_gating_func is 2; nothing but 1"):
        make_driver(tmp_path / "b.gguf")


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0])
def test_experts_of_one_tensor_are_parts_of_it(kind: GGMLQuantizationType) -> None:
    values = np.random.default_rng(0).standard_normal((3, 4, 64)).astype(np.float32)
    data = quantize(values, kind).view(np.uint8)
    parts = GGUFTensor(values.shape, kind, data.data.cast("B")).parts()
    assert [part.shape for part in parts] == [(4, 64)] * 3
    for part, wanted in zip(parts, dequantize(data, kind).reshape(values.shape), strict=True):
        assert np.array_equal(rows_of(part, 1, 2), wanted[1:3])
