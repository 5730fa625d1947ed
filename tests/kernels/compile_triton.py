"""Compiles the Triton backend's kernels for a GPU that need not be there: `python -m tests.kernels.compile_triton 90`.

Its operations are called as ever, with tensors that have no memory, on a driver that compiles and launches nothing.
Prints the names of what was compiled.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.kernels.absent import AbsentGpu
from worker.kernels.delta import DeltaParameters, DeltaSpec, DeltaState
from worker.kernels.elementwise import RopeTable
from worker.kernels.experts import ClampedSwiglu, ExpertsSpec, ExpertWeights, RouteSpec
from worker.kernels.gqa import GqaSpec, QkNorm
from worker.kernels.linear import LinearSpec
from worker.kernels.mla import LatentNorm, MlaSpec
from worker.kernels.step import Chunk, SlotTables, StagedRows, Step, StepBuffers
from worker.kernels.torch.linear import PackedLinear
from worker.kernels.triton.delta import TritonDelta
from worker.kernels.triton.elementwise import TritonEmbedding, TritonGatedActivation, TritonRmsNorm
from worker.kernels.triton.experts import TritonExperts
from worker.kernels.triton.gated_norm import TritonGatedNorm
from worker.kernels.triton.gqa import TritonGqa
from worker.kernels.triton.linear import TritonLinear
from worker.kernels.triton.linear_grouped import TritonGroupedLinear
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.mla import TritonMla
from worker.kernels.triton.prepare import TritonPrepare, TritonRemember
from worker.kernels.triton.route import TritonRoute
from worker.kernels.triton.sample_ranks import TritonBestOfRanks
from worker.kernels.triton.sum_norm import norm_of_parts, sum_and_norm
from worker.kernels.triton.weight_tile import CENTRED, PackedGrouped
from worker.kernels.weights import Dense, Form, Grouped
from worker.parallel.group import Group
from worker.parallel.symmetric import Inboxes, Parts

META = torch.device("meta")
MACHINES = {
    80: Machine(num_sms=108, shared_memory=166_912, can_overlap=False, has_float8=False),
    90: Machine(num_sms=132, shared_memory=232_448, can_overlap=True),
}


class Driver(AbsentGpu):
    """Notes what is loaded and launched."""

    def __init__(self, capability: int) -> None:
        super().__init__(GPUTarget("cuda", capability, 32))
        self.utils = self
        self.loaded: list[str] = []
        self.launched: list[str] = []

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MACHINES[self.target.arch].shared_memory}

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spilled, threads that a program can have)"""
        assert code and device == 0
        self.loaded.append(name)
        return 1, 1, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: self.launched.append(metadata.name)


def compile_only(run: Callable[..., Any], shared_memory: int) -> Callable[..., Any]:
    """In place of a kernel's launch, which has all parameters in their order, as `Launches` wants them."""

    def compiled(kernel: JITFunction, *args: object, warmup: bool, **options: object) -> None:
        assert len(args) == len(kernel.params)
        made = run(kernel, *args, warmup=True, **options)
        assert made.metadata.shared <= shared_memory, f"{kernel.__name__} needs {made.metadata.shared} bytes"
        print(kernel.__name__, flush=True)

    return compiled


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def integers(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


def attend(machine: Machine, spec: GqaSpec, step: Step, dtype: torch.dtype | None = None) -> None:
    """`dtype`: of activations; None: the cache's."""
    dtype = dtype or spec.dtype
    kernel = TritonGqa(spec, machine, dtype)
    cache = kernel.allocate(1, 101, 16, META).layers[0]
    buffers = StepBuffers.allocate(step.num_tokens, step.num_rows, 1000, 100, META)
    dim, rotary_dim = spec.head_dim, spec.rotary_dim or spec.head_dim
    width = (spec.num_heads + spec.num_kv_heads) * dim + spec.num_kv_heads * spec.value_dim
    norm = QkNorm(empty(dim, dtype=dtype), empty(dim, dtype=dtype), 1e-6)
    rope = RopeTable(empty(64, rotary_dim, dtype=dtype), empty(64, rotary_dim, dtype=dtype))
    metadata = kernel.prepare(step, buffers, 16)
    qkv = empty(step.num_tokens, width, dtype=dtype)
    sinks = empty(spec.num_heads, dtype=dtype) if spec.has_sinks else None
    kernel.attend(*kernel.write_qkv(qkv, norm, rope, cache, metadata), cache, metadata, sinks)
    kernel.write_and_attend(qkv, norm, rope, cache, metadata, sinks)


def attend_all(machine: Machine) -> None:
    chunks = (Chunk(40, 100),)
    for heads, kv_heads, dim, dtype, num_rows, uniform_len in (
        (32, 8, 128, torch.bfloat16, 256, 1),
        (32, 8, 128, torch.bfloat16, 8, 4),
        (32, 8, 256, torch.bfloat16, 8, 1),
        (9, 3, 64, torch.float32, 8, 1),
        (8, 2, 512, torch.bfloat16, 8, 1),
        (8, 2, 512, torch.float32, 8, 1),
    ):
        spec = GqaSpec(heads, kv_heads, dim, dim**-0.5, dtype)
        attend(
            machine, spec, Step(num_uniform_rows=num_rows, uniform_len=uniform_len, chunks=chunks, max_context_len=9)
        )
        attend(machine, spec, Step(num_uniform_rows=1, max_context_len=300))
    narrow = GqaSpec(64, 8, 192, 0.1, torch.bfloat16, window=128, has_sinks=True, v_head_dim=128, rotary_dim=64)
    for spec in (GqaSpec(64, 8, 64, 0.125, torch.bfloat16, window=128, has_sinks=True), narrow):
        attend(machine, spec, Step(num_uniform_rows=8, chunks=chunks, max_context_len=9))
        attend(machine, spec, Step(num_uniform_rows=1, max_context_len=300))
    if machine.can_overlap:  # compute capability 9.0; float8 needs 8.9
        spec = GqaSpec(32, 8, 128, 0.1, torch.float8_e4m3fn)
        attend(machine, spec, Step(num_uniform_rows=8, chunks=chunks, max_context_len=9), torch.bfloat16)


def attend_latents_all(machine: Machine) -> None:
    """Of 128 heads, and of a rank's 16: rows, chunks, chosen tokens."""
    for heads, num_rows, uniform_len in ((128, 4, 1), (16, 256, 1), (16, 4, 3)):
        spec = MlaSpec(
            heads, latent_dim=512, rope_dim=64, nope_dim=128, v_head_dim=128, scale=0.1, dtype=torch.bfloat16
        )
        kernel = TritonMla(spec, machine)
        cache = kernel.allocate(1, 101, 16, META).layers[0]
        norm, table, expand = LatentNorm(empty(512), 1e-6), empty(64, 64), empty(heads, 256, 512)
        step = Step(
            num_uniform_rows=num_rows, uniform_len=uniform_len, chunks=(Chunk(40, 100), Chunk(200, 300)),
            max_context_len=9000,
        )  # fmt: skip
        buffers = StepBuffers.allocate(step.num_tokens, step.num_rows, 1000, 100, META)
        metadata = kernel.prepare(step, buffers, 16)
        x = empty(step.num_tokens, heads * spec.head_dim + spec.row_dim)
        q = kernel.write(x, norm, RopeTable(table, table), cache, metadata)
        kernel.attend(*q, cache, expand, metadata)
        kernel.attend(*q, cache, expand, metadata, empty(step.num_tokens, 2048, dtype=torch.int32))


def follow_delta_rule(machine: Machine) -> None:
    """In Qwen3-Next's shape."""
    for dtype, num_drafts in ((torch.bfloat16, 0), (torch.float32, 0), (torch.bfloat16, 4)):
        spec = DeltaSpec(16, 32, 128, 128, 4, dtype, num_drafts)
        kernel, heads, channels = TritonDelta(spec, machine, dtype), spec.num_value_heads, spec.num_channels
        rule = (empty(*size, dtype=torch.float32) for size in ((heads,), (heads,), (channels, spec.width)))
        parameters = DeltaParameters(*rule)
        state = DeltaState.zeros(spec, 9, META)
        for step in kernel.all_steps(100, 1000, 1000):
            buffers = StepBuffers.allocate(step.num_tokens, step.num_rows, 9, 9, META)
            projected = empty(step.num_tokens, channels + spec.value_size + 2 * heads, dtype=dtype)
            qkv, gate, b, a = projected.split((channels, spec.value_size, heads, heads), -1)
            lag = empty(step.num_rows, dtype=torch.int64) if num_drafts else None
            metadata = kernel.prepare(step, buffers, lag)
            mixed = kernel.convolve(qkv, parameters, state, metadata)
            found = kernel.update(mixed, a, b, parameters, state, metadata)
            TritonGatedNorm(machine)(found, gate.unflatten(-1, (heads, 128)), empty(128, dtype=dtype), 1e-6)


def choose_experts(machine: Machine) -> None:
    for num_rows, spec in ((1, RouteSpec(128, 8)), (100, RouteSpec(256, 8, True, True, 8, 4, 2.5))):
        route = TritonRoute(spec, machine)
        route(empty(num_rows, spec.num_experts, dtype=torch.float32), empty(spec.num_experts, dtype=torch.float32))
    for num_rows, dtype in ((1, torch.bfloat16), (8, torch.float32)):
        x = empty(num_rows, 2048)
        route.of_norm(x, x, empty(2048), 1e-6, empty(256, 2048, dtype=dtype), None)


def compute_experts(machine: Machine) -> None:
    """Of all sizes of tiles."""
    plain = ExpertsSpec(128, 2048, 768, 8)
    clamped = ExpertsSpec(32, 2880, 2880, 4, first_expert=32, clamped=ClampedSwiglu(1.7, 7.0), has_bias=True)
    for spec, dtype, all_rows in (
        (plain, torch.bfloat16, (1, 64, 1024, 8192)),
        (plain, torch.float32, (100,)),
        (clamped, torch.bfloat16, (1, 8)),
        (replace(plain, activation="gelu_tanh"), torch.bfloat16, (1, 8)),
    ):
        experts, hidden = TritonExperts(spec, machine, dtype), spec.hidden_size
        sizes = ((2 * spec.intermediate_size, hidden), (hidden, spec.intermediate_size))
        gate_up, down = (
            Dense(empty(spec.num_experts, *size, dtype=dtype), empty(spec.num_experts, size[0], dtype=dtype)
                  if spec.has_bias else None)
            for size in sizes
        )  # fmt: skip
        packed = experts.pack(ExpertWeights(gate_up, down))
        for num_rows in all_rows:
            weights, ids = (empty(num_rows, spec.top_k, dtype=kind) for kind in (torch.float32, torch.int32))
            experts(empty(num_rows, hidden, dtype=dtype), weights, ids, packed)


def multiply_grouped(machine: Machine) -> None:
    """Numbers of all forms, and experts of them."""
    linear = TritonGroupedLinear(LinearSpec(4096, 6144, Grouped), machine)
    for form, group in (("e4m3", 128), ("int8", 4096), ("uint8", 16), ("uint4", 32), ("e2m1", 32)):
        packed = linear.pack(grouped(form, group, 6144, 4096))
        linear(empty(1, 4096), packed)
        linear(empty(65, 4096), packed)
    centred = PackedGrouped(
        empty(6144, 2048, dtype=torch.uint8), empty(6144, 32, dtype=torch.int32), None, CENTRED.value, 128, False
    )
    for num_rows in (1, 64, 65):
        linear(empty(num_rows, 4096), centred)
    linear.gated(empty(8, 4096), centred)
    spec = ExpertsSpec(32, 2880, 2880, 4, clamped=ClampedSwiglu(1.7, 7.0), kind=Grouped)
    experts = TritonExperts(spec, machine, torch.bfloat16)
    packed = experts.pack(ExpertWeights(grouped("e2m1", 32, 32, 5760, 2880), grouped("e2m1", 32, 32, 2880, 2880)))
    for num_rows in (1, 2048):
        weights, ids = (empty(num_rows, spec.top_k, dtype=kind) for kind in (torch.float32, torch.int32))
        experts(empty(num_rows, 2880), weights, ids, packed)


def grouped(form: Form, group: int, *shape: int) -> Grouped:
    *outputs, inputs = shape
    kinds = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
    numbers = empty(*outputs, inputs // (2 if form in ("uint4", "e2m1") else 1), dtype=kinds.get(form, torch.uint8))
    scales = partial(empty, *outputs, inputs // group)
    if form in ("uint4", "uint8"):
        return Grouped(form, numbers, scales(dtype=torch.float16), scales(dtype=torch.float16))
    return Grouped(form, numbers, scales(dtype=torch.uint8 if form == "e2m1" else torch.float32))


def send_parts(machine: Machine, inboxes: Inboxes) -> None:
    for num_rows, inputs in ((8, 1024), (8, 8192), (64, 6144)):
        linear = TritonLinear(LinearSpec(inputs, 4096), machine, torch.bfloat16)
        part = linear.sent(empty(num_rows, inputs), PackedLinear(empty(4096, inputs), None), inboxes)
        assert part is not None
        residual, weight = empty(num_rows, 4096), empty(4096)
        sum_and_norm(part, residual, weight, 1e-6, inboxes, overlaps=machine.can_overlap, num_warps=8)


def main() -> None:
    capability = int(sys.argv[1])
    machine = MACHINES[capability]
    triton.runtime.driver.set_active(Driver(capability))
    JITFunction.run = compile_only(JITFunction.run, machine.shared_memory)
    attend_all(machine)
    attend_latents_all(machine)
    follow_delta_rule(machine)
    for num_rows in (1, 8, 64):
        linear = TritonLinear(LinearSpec(4096, 6144), machine, torch.bfloat16)
        linear(empty(num_rows, 4096), PackedLinear(empty(6144, 4096), None))
        linear.gated(empty(num_rows, 4096), PackedLinear(empty(6144, 4096), None))
    multiply_grouped(machine)
    TritonRmsNorm(4096, machine).add_norm(empty(8, 4096), empty(8, 4096), empty(4096), 1e-6, Group())
    linear, packed = (
        TritonLinear(LinearSpec(1024, 6144), machine, torch.bfloat16),
        PackedLinear(empty(6144, 1024), None),
    )
    linear(empty(8, 1024), packed)
    linear.gated(empty(8, 1024), packed)
    for is_gated in (False, True):
        linear.of_norm(empty(1, 1024), empty(1, 1024), empty(1024), 1e-6, packed, is_gated=is_gated)
    for rank, dtype in ((0, torch.bfloat16), (1, torch.float32)):
        inboxes = Inboxes(integers(2), empty(64, dtype=torch.int32), 4096, rank, integers(1))
        x, residual, weight = empty(8, 4096, dtype=dtype), empty(8, 4096, dtype=dtype), empty(4096, dtype=dtype)
        sum_and_norm(x, residual, weight, 1e-6, inboxes, overlaps=machine.can_overlap, num_warps=8)
        norm_of_parts(Parts(integers(2), 1 << 26), residual, weight, 1e-6, num_warps=8)
        tables = SlotTables(empty(9, 99, dtype=torch.int32), integers(9), integers(1), integers(1))
        TritonBestOfRanks(machine)(x, 4096 * rank, inboxes, integers(8), integers(8), tables)
        if dtype == torch.bfloat16:
            send_parts(machine, inboxes)
    choose_experts(machine)
    compute_experts(machine)
    TritonGatedActivation("silu", machine)(empty(8, 24576))
    TritonEmbedding(machine)(integers(8), empty(1000, 4096), None, empty(8, 4096))
    slots = SlotTables(empty(9, 99, dtype=torch.int32), integers(9), empty(9, 128, dtype=torch.int32), integers(9))
    rows = StagedRows(integers(8), integers(8), integers(8))
    buffers = StepBuffers.allocate(8, 8, 128, 99, META)
    TritonPrepare(machine)(rows, slots, Step(num_uniform_rows=8, max_context_len=99), 16, buffers)
    TritonRemember(machine)(slots, integers(8), integers(8), integers(8))


if __name__ == "__main__":
    main()
