"""What keeps a worker from starting is said before a rank runs, where it can be known."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.fakes.tiny_model import write_tiny_model
from worker import start_checks
from worker.config import WorkerSettings
from worker.executor.errors import ExecutorStartError
from worker.layers.linear import shard_of, shard_or_copy
from worker.loader.errors import ModelConfigError, ModelError
from worker.loader.shards import INDEX
from worker.parallel.group import Group
from worker.runner.build import resolve_device
from worker.runner.host import torch_has_cuda
from worker.start_checks import RANK_BYTES, check_start

WEIGHTS = "model.safetensors"
DRIVER = "int cuInit(unsigned flags) { return %d; } int cuDeviceGetCount(int *count) { *count = %d; return 0; }"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Its tensors are not those of its configuration: nothing here reads them."""
    folder = write_tiny_model(tmp_path / "model")
    save_file({"a": torch.zeros(100)}, folder / WEIGHTS)
    return folder


def check(model: Path | str, **settings: Any) -> None:
    check_start(WorkerSettings(model=str(model), device=settings.pop("device", "cpu"), **settings))


def write_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def cut(folder: Path, num_bytes: int) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(num_bytes)


def index(folder: Path, *files: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": file for i, file in enumerate(files)}}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json and 0 models in .gguf files"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read .*config.json: Expecting property name"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda folder: write_config(folder, architectures=["NopeLM"]), "architecture 'NopeLM' is not supported"),
        (lambda folder: write_config(folder, hidden_size="48"), "config.json: hidden_size is '48'; a whole number"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer: none of tokenizer.json, "),
        (lambda folder: (folder / WEIGHTS).unlink(), f"there is neither {INDEX} nor any \\*.safetensors file"),
        (lambda folder: cut(folder, 465), r"model.safetensors has 465 bytes; by its header it has 472: it was not"),
        (lambda folder: cut(folder, 20), "it ends within its header, after 20 bytes"),
        (lambda folder: cut(folder, 0), "it has 0 bytes, too few"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"version https://git-lfs"), "does not begin like a safetensor"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"\2" + bytes(7) + b"[]"), "does not say where its tensors are"),
        (lambda folder: index(folder), "weight_map is {}; a map from at least one tensor"),
        (lambda folder: index(folder, WEIGHTS, "b", "c"), f"lacks 2 of the 3 files that {INDEX} names: b, c$"),
    ],
)
def test_a_models_files(model: Path, damage: Callable[[Path], object], said: str) -> None:
    check(model)
    damage(model)
    with pytest.raises(ModelError, match=said):
        check(model)


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    check(write_tiny_model(tmp_path / "model"), load_format="dummy")


def test_a_format_that_the_model_does_not_have(model: Path) -> None:
    with pytest.raises(ModelConfigError, match="is no gguf model but a safetensors one"):
        check(model, load_format="gguf")


@pytest.mark.parametrize("kind", ["draft", "eagle3"])
def test_a_draft_models_files(model: Path, tmp_path: Path, kind: str) -> None:
    draft = Path(shutil.copytree(model, tmp_path / "draft"))
    if kind == "eagle3":
        write_config(draft, architectures=["LlamaForCausalLMEagle3"])
    cut(draft, 465)
    with pytest.raises(ModelConfigError, match=r"^draft model .*/draft: .*model.safetensors has 465 bytes"):
        check(model, speculative=kind, draft_model=str(draft))


@pytest.mark.parametrize(
    ("fields", "size", "said"),
    [
        ({}, 4, "tensor_parallel_size 4: the 6 attention heads of LlamaForCausalLM do not divide by it"),
        ({}, 3, "tensor_parallel_size 3: the 80 features inside an MLP of LlamaForCausalLM do not divide by it"),
        ({"intermediate_size": 96}, 3, "the 2 KV heads of LlamaForCausalLM do not divide by it, nor it by them"),
        ({"intermediate_size": 96, "num_key_value_heads": 6}, 12, "the 6 attention heads"),
    ],
)
def test_a_model_that_ranks_cannot_share(model: Path, fields: dict[str, Any], size: int, said: str) -> None:
    write_config(model, **fields)
    with pytest.raises(ModelConfigError, match=said):
        check(model, tensor_parallel_size=size)


def test_a_gguf_file_that_ranks_cannot_share() -> None:
    with pytest.raises(ModelConfigError, match="tensor_parallel_size 100: the 9 attention heads"):
        check("smollm2", tensor_parallel_size=100)


def test_what_is_summed_is_on_one_rank_alone() -> None:
    """Held twice, it would count twice."""
    assert shard_or_copy(2, Group(3, 4), "keys") == (1, 1)
    with pytest.raises(ValueError, match="2 units of input cannot be divided over 4 ranks"):
        shard_of(2, Group(3, 4), "input")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_ranks_than_gpus(model: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(start_checks, "num_visible_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    said = "no CUDA device for rank 1 of this host: 1 are visible"
    with pytest.raises(ModelConfigError, match=said):
        check(model, device=device, tensor_parallel_size=2)
    with pytest.raises(ModelConfigError, match=said):
        resolve_device(device, 1)
    secret = "x" * 16
    check(model, device=device, tensor_parallel_size=2, remote_ranks=1, ranks_secret=secret)


def test_a_torch_without_cuda_is_known_without_importing_it() -> None:
    assert torch.backends.cuda.is_built() or not torch_has_cuda()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("status", "has_cuda", "found"), [(0, True, 3), (100, True, 0), (0, False, None)])
def test_gpus_are_counted_by_their_driver(tmp_path: Path, status: int, has_cuda: bool, found: int | None) -> None:
    """A torch without CUDA computes on the CPU, whatever GPUs there are."""
    (tmp_path / "driver.c").write_text(DRIVER % (status, 3))
    subprocess.run(["cc", "-shared", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True)
    code = "from pathlib import Path; from worker.runner import host; host.AMD_DEVICES = Path('/nowhere'); "
    code += f"host.torch_has_cuda = lambda: {has_cuda}; "
    done = subprocess.run(
        [sys.executable, "-c", code + "print(host.num_visible_gpus())"],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"{found}\n"


def test_memory_that_is_not_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "available_host_memory", lambda: 2 * RANK_BYTES - 1)
    with pytest.raises(ExecutorStartError, match=r"2 ranks on this host take 0\.3 GiB .* 0\.3 GiB are free"):
        check(model, tensor_parallel_size=2)


def test_more_ranks_than_cores_are_warned_of(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_checks, "physical_cores", lambda: 1)
    check(model, tensor_parallel_size=2)
    assert "2 ranks share 1 cores of this host" in caplog.text
