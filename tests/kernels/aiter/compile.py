"""Compiles the Triton kernels that the aiter backend launches, AITER's and ours, for an AMD GPU that need not be there.

    python -m tests.kernels.aiter.compile gfx942

Every operation goes through its paths, as in a step of a model with heads of 128 in bf16; each launch is compiled to a
code object of the GPU and not run. Prints a line of JSON: kernel → bytes of its code objects.
"""

import json
import sys
from dataclasses import replace

import torch

from tests.kernels.absent import compiled_sizes
from tests.kernels.aiter.shim import on_cpu
from tests.kernels.rig import CPU, Rig, Rows
from worker.kernels.elementwise import EMBEDDING, GATED_ACTIVATION, RMS_NORM, ActivationSpec, EmbeddingSpec, NormSpec
from worker.kernels.gqa import QkNorm
from worker.kernels.linear import LINEAR, LinearSpec
from worker.kernels.prepare import PREPARE_STEP
from worker.kernels.sampling import CHOOSE, LOGPROBS, MASKED_COPY, DrawRules, Draws, Parameters
from worker.kernels.select import Kernels
from worker.kernels.step import Chunk, SlotTables, StagedRows, Step, StepBuffers
from worker.kernels.weights import Dense
from worker.parallel.group import Group

SHAPE = (8, 2, 128)


def compile_all(architecture: str) -> dict[str, int]:
    with on_cpu(architecture), compiled_sizes("hsaco") as sizes:
        _use_everything(Rig(Kernels(CPU, "aiter"), torch.bfloat16))
    return dict(sizes)


def _use_everything(rig: Rig) -> None:
    x, weight = rig.noise(4, 1024), rig.noise(1024)
    norm = rig.choose(RMS_NORM, NormSpec(1024))
    norm.norm(x, weight, 1e-6)
    norm.add_norm(x, x.clone(), weight, 1e-6, Group())
    linear = rig.choose(LINEAR, LinearSpec(1024, 1024))
    linear(x, linear.pack(Dense(rig.noise(1024, 1024), weight)))
    rig.choose(GATED_ACTIVATION, ActivationSpec(512))(x)
    rig.choose(EMBEDDING, EmbeddingSpec(1024))(torch.tensor([1, 2]), x)
    _prepare(rig)
    _sample(rig)
    qk_norm = QkNorm(rig.noise(SHAPE[2]), rig.noise(SHAPE[2]), 1e-6)
    for has_sinks, window in ((False, None), (True, None), (True, 128)):
        decode = Rows(rig, SHAPE, [1, 1], [20, 5], 16, has_sinks=has_sinks, window=window)
        decode.kernel.write_qkv(decode.qkv, qk_norm, None, decode.cache, decode.metadata)
        decode.attend()
        mixed = Rows(rig, SHAPE, [1, 300], [20, 310], 16, has_sinks=has_sinks, window=window)
        mixed.attend()
        decode.metadata = decode.kernel.prepare(replace(decode.step, max_context_len=4096), decode.buffers, 16)
        decode.attend()


def _prepare(rig: Rig) -> None:
    """A uniform row and a chunk."""
    tables = torch.zeros(3, 2, dtype=torch.int32)
    slots = SlotTables(torch.zeros(3, 32, dtype=torch.int32), torch.ones(3).long(), tables, torch.zeros(3).long())
    rows = StagedRows(torch.tensor([0, 1]), torch.tensor([0, 3]), torch.tensor([1, 4]))
    step = Step(num_uniform_rows=1, chunks=(Chunk(4, 7),), max_context_len=7)
    rig.choose(PREPARE_STEP, None)(rows, slots, step, 16, StepBuffers.allocate(8, 2, 2, 9, CPU))


def _sample(rig: Rig) -> None:
    """Greedy and drawn rows with every rule, and a vocabulary of some chunks."""
    logits, rows = rig.noise(2, 1000), torch.tensor([1, 0])
    for rules in (DrawRules(0, None, 0, False, False, False), DrawRules(2, None, 50, True, True, True)):
        draws = Draws(rules, Parameters.neutral(2, CPU), rows, rows)
        tables = SlotTables(torch.zeros(3, 32, dtype=torch.int32), torch.ones(3).long(), rows, rows)
        rig.kernels.choose(CHOOSE, None, torch.float32)(logits, rows, draws, tables)
    mask = torch.zeros(2, 32, dtype=torch.int32)
    rig.kernels.choose(MASKED_COPY, None, torch.float32)(logits, rows, 2, mask)
    rig.kernels.choose(LOGPROBS, None, torch.float32)(logits, rows, rows, 20)


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1])))
