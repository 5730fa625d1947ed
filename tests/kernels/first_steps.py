"""Which kernels steps need that no rehearsal asked for: `python -m tests.kernels.first_steps`. Prints both as JSON.

A model of Triton's kernels on an H100 that need not be there: nothing is compiled or launched, only asked for. What
torch must know of a step, where a token goes and which came out, it is told.
"""

import json
import random
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompilationError

import worker.kernels.triton as backend
from tests.kernels.compile_triton import MACHINES, Driver
from tests.kernels.recorder import Recorder
from worker.core.batch import NewSequence, ScheduledBatch
from worker.core.params import SamplingParams
from worker.core.tokens import token_array
from worker.kernels import backends
from worker.kernels.torch.prepare import prepare_step
from worker.kernels.triton import ahead
from worker.kernels.triton.ahead import CompileAhead
from worker.kernels.triton.gqa import TritonGqa
from worker.kernels.triton.prepare import TritonPrepare
from worker.kernels.triton.sample import TritonChoose
from worker.parallel.group import Group
from worker.runner import build
from worker.runner.assembly import NOTHING, Assembly
from worker.runner.config import RunnerConfig
from worker.runner.graphs import GraphCapture, Graphs, GraphSizes
from worker.runner.greedy import choices_alone
from worker.runner.model_runner import ModelRunner
from worker.runner.rehearsal import rehearse

VOCABULARY, NUM_SLOTS, NUM_TOKENS, MAX_LEN = 5_000, 101, 2100, 8192
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 32,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
DRAFT = MODEL | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
NUM_DRAFTS = 6
ASKED = (
    {"temperature": 0.0}, {}, {"top_k": 7}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.1}, {"top_p": 0.9},
    {"repetition_penalty": 1.1}, {"temperature": 0.0, "logit_bias": ((3, 1.0),)}, {"banned_token_ids": (4,)},
)  # fmt: skip


@triton.jit
def _right_kernel(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 1.0)


@triton.jit
def _wrong_kernel(x):
    tl.store(x, no_such_name)  # noqa: F821


def compile_some() -> None:
    """Kernels are compiled and loaded once, and only then launched; a wrong one is left for its launch, and one that
    nobody asked for is logged."""
    driver, x = Driver(90), torch.zeros(64)
    triton.runtime.driver.set_active(driver)
    compiler = CompileAhead(x.device, num_threads=2)
    with compiler.threads(), compiler.rehearsal():
        for _ in range(2):
            for size in (16, 32):
                _right_kernel[(1,)](x, size)
        _wrong_kernel[(1,)](x)
    assert compiler.num_kernels == 3
    assert (driver.loaded, driver.launched) == (["_right_kernel"] * 2, [])
    triton.knobs.runtime.jit_cache_hook = refuse_to_compile
    _right_kernel[(1,)](x, 32)
    triton.knobs.runtime.jit_cache_hook = None
    assert (len(driver.loaded), driver.launched) == (2, ["_right_kernel"])
    try:
        _wrong_kernel[(1,)](x)
    except CompilationError as error:
        assert "no_such_name" in str(error)
    else:
        raise AssertionError("a wrong kernel was launched")

    late: list[str] = []
    ahead.logger.addFilter(lambda record: late.append(record.getMessage()) or False)
    _right_kernel[(1,)](x, 32)
    assert late == []
    _right_kernel[(1,)](x, 64)
    assert len(late) == 1 and "_right_kernel" in late[0]


def refuse_to_compile(*, repr: str, **_: object) -> bool:
    raise AssertionError(f"{repr} was to be compiled")


def tell_torch() -> None:
    """What it must know of a step, before an assembly is built."""
    prepare, draw = TritonPrepare.__call__, TritonChoose.__call__

    def prepare_both(*arguments: Any) -> None:
        prepare(*arguments)
        prepare_step(*arguments[1:])

    def choose_nothing(*arguments: Any) -> Tensor:
        return draw(*arguments).zero_()

    TritonPrepare.__call__, TritonChoose.__call__ = prepare_both, choose_nothing
    TritonGqa._attend_dense = lambda _, q, k, v, num_rows: q.flatten(1)


def build_assembly() -> Assembly:
    """Of the kernels that an H100 would get, on a CPU."""
    backends._OBSTACLES["triton"] = lambda _: None
    backend.machine_of = lambda _: MACHINES[90]
    found: list[Assembly] = []
    build.compile_ahead = lambda assembly, watch: found.append(assembly)
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as draft:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        Path(draft, "config.json").write_text(json.dumps(DRAFT))
        config = RunnerConfig(
            model=model, load_format="dummy", dtype="bfloat16", device="cpu", kernel_backend="triton", num_blocks=1,
            max_num_seqs=NUM_SLOTS, max_num_batched_tokens=NUM_TOKENS, drafter="draft", draft_model=draft,
            num_speculative_tokens=NUM_DRAFTS,
        )  # fmt: skip
        with CompileAhead(torch.device("cpu"), 1).rehearsal():  # or kernels would know what Triton answered
            build.build_runner(config, Group())
    return found[0]


@torch.inference_mode()
def capture(assembly: Assembly, device: Recorder, rows: tuple[int, ...]) -> Graphs:
    """Full graphs of so many rows, greedy choices included."""
    parts = assembly.parts(NOTHING)
    greedy = choices_alone(parts.kernels, parts.tp, parts.model, parts.slots, parts.preparer.buffers)
    graphs = GraphCapture(device, parts.model, parts.builders, parts.preparer, assembly.max_model_len, greedy)
    return graphs.capture(GraphSizes(rows=rows))


def run_steps(runner: ModelRunner, chosen: random.Random) -> None:
    """Steps of all sizes, rows of all lengths, all that can be asked for of sampling."""
    sizes = product((0, 1, 2, 9, 16, 17, 33, 64, 65, 100), (600, 2100, MAX_LEN - 1), (False, True))
    for step, (num_rows, longest, has_chunk) in enumerate(sizes):
        lens = [1] * num_rows
        if has_chunk or not lens:
            lens.append(chosen.choice((1, 2, 7, 32, 63, 64, 65, 130, 1100)))
        computed = [max(0, chosen.randint(longest // 2, longest) - length) for length in lens]
        if num_rows == 2 and has_chunk:
            lens[-1], computed[-1] = 2098, 0
        samples = [length == 1 for length in lens]
        if len(lens) > num_rows:
            samples[-1] = chosen.random() < 0.5
        asked = chosen.sample(ASKED, chosen.randint(1, 3))
        news = [
            NewSequence(
                slot, token_array([1]) * (at + length), at + 1, SamplingParams(
                    **chosen.choice(asked), num_logprobs=chosen.choice((None, None, 0, 1, 3, 20)),
                    num_prompt_logprobs=chosen.choice((None, None, 2)),
                ), (0,),
            )
            for slot, (at, length) in enumerate(zip(computed, lens, strict=True))
        ]  # fmt: skip
        drafts = {row: num - 1 for row, num in enumerate(lens) if samples[row] and 1 < num <= 1 + NUM_DRAFTS}
        runner.execute(
            ScheduledBatch(
                step, list(range(len(lens))), lens, computed, token_array([1]) * sum(lens), samples, news,
                num_draft_tokens=drafts,
            )
        )  # fmt: skip


def main() -> None:
    compile_some()
    triton.runtime.driver.set_active(Driver(90))
    asked_for: dict[tuple[str, str], str] = {}

    def note(*, key: str, repr: str, fn: Any, **_: object) -> bool:
        asked_for.setdefault((fn.name, key), repr)
        return True

    triton.knobs.runtime.jit_cache_hook = note
    tell_torch()
    assembly = build_assembly()
    asked_for.clear()
    with CompileAhead(assembly.kernels.device, 1).rehearsal():
        rehearse(assembly.parts(NOTHING), assembly.max_model_len, NUM_SLOTS * (1 + NUM_DRAFTS))
        rehearsed = set(asked_for)
        capture(assembly, Recorder(), (1, 2, 16, 65, NUM_SLOTS))
        run_steps(assembly.runner(NOTHING), random.Random(0))
    late = {key: text for key, text in asked_for.items() if key not in rehearsed}
    print(json.dumps({"ahead": sorted({name for name, _ in rehearsed}), "late": list(late.values())}))


if __name__ == "__main__":
    main()
