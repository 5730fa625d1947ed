"""Gated DeltaNet in Triton: rows of one token, and tentative ones, by recurrence, others in chunks."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker.kernels.delta import DeltaKernel, DeltaParameters, DeltaSpec, DeltaState
from worker.kernels.step import Chunk, Step, StepBuffers
from worker.kernels.triton.delta_chunks import prepare_chunks_kernel, update_chunks_kernel
from worker.kernels.triton.delta_conv import convolve_kernel
from worker.kernels.triton.delta_rows import update_rows_kernel
from worker.kernels.triton.launch import Launches
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import MAX_OVERLAP_TOKENS, launch_options

CHUNK = 64
CONV_TOKENS, CONV_CHANNELS = 16, 256
"""Of a program of the convolution; of one token, the channels alone."""
VALUES = 32
"""Columns of a head's state that a program has."""
NARROWEST = 64
"""Of heads, with padding: Triton 3.6 reads past the shared memory of narrower factors of 16 bits."""


@dataclass(frozen=True, slots=True)
class Metadata:
    buffers: StepBuffers
    num_single: int
    """Rows of one token, which come first."""
    num_long: int
    """Rows behind them."""
    num_tokens: int
    """Of those."""
    lag: Tensor | None
    num_short: int
    """Rows that go by recurrence, or may have to catch up: the first ones."""
    has_chunks: bool
    """Some rows are neither of one token nor tentative."""
    overlaps: bool
    """Of the kernels for single tokens: those for chunks wait for all before them, as they are launched."""
    launches: Launches

    def num_tiles(self, num_tokens: int) -> int:
        """As many of so many tokens as the rows behind the first ones can have: each begins one of its own."""
        return self.num_tokens // num_tokens + self.num_long


class TritonDelta(DeltaKernel):
    def __init__(self, spec: DeltaSpec, machine: Machine, dtype: torch.dtype) -> None:
        """`dtype`: of activations."""
        self._spec, self._machine = spec, machine
        self._keys, self._values = (
            max(NARROWEST, triton.next_power_of_2(dim)) for dim in (spec.key_dim, spec.value_dim)
        )
        stage = CHUNK * (3 * self._keys + VALUES + CHUNK) * dtype.itemsize
        self._num_stages = max(1, min(3, machine.shared_memory * 3 // 4 // stage))

    def prepare(self, step: Step, buffers: StepBuffers, lag: Tensor | None) -> Metadata:
        num_single = step.num_uniform_rows if step.uniform_len == 1 else 0
        longest = max([step.uniform_len * (step.num_rows > num_single), *(chunk.num_tokens for chunk in step.chunks)])
        return Metadata(
            buffers,
            num_single,
            step.num_rows - num_single,
            step.num_tokens - num_single,
            lag,
            num_single if lag is None else step.num_rows,
            longest > self._spec.most_tentative,
            self._machine.overlaps(step.num_tokens),
            Launches(),
        )

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        return (max_context_len,)

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterator[Step]:
        """One row, whose tensors may have another stride than those of several; a few; a chunk beside one, with more
        tokens than overlap."""
        for num_rows in range(1, min(max_rows, 2) + 1):
            yield Step(num_uniform_rows=num_rows, max_context_len=1)
        num_beside = min(1, max_rows - 1)
        longest = min(MAX_OVERLAP_TOKENS + 1, max_tokens - num_beside, max_context_len)
        yield Step(num_uniform_rows=num_beside, chunks=(Chunk(longest, longest),), max_context_len=longest)

    def convolve(self, x: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: Metadata) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for is_single, num_programs in ((True, metadata.num_single), (False, metadata.num_tiles(CONV_TOKENS))):
            if num_programs:
                self._convolve(x, parameters, state, metadata, out, num_programs, is_single=is_single)
        return out

    def _convolve(
        self, x: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: Metadata, out: Tensor,
        num_programs: int, *, is_single: bool,
    ) -> None:  # fmt: skip
        channels, kept, buffers = self._spec.num_channels, self._spec.num_inputs, metadata.buffers
        overlaps = metadata.overlaps and is_single
        metadata.launches(
            convolve_kernel, (num_programs, triton.cdiv(channels, CONV_CHANNELS)),
            x, parameters.taps, state.inputs, out, buffers.groups, buffers.query_starts, buffers.positions, x.stride(0),
            metadata.num_single, metadata.num_long, channels, self._spec.width, kept,
            1 if is_single else triton.next_power_of_2(kept), 1 if is_single else CONV_TOKENS, CONV_CHANNELS,
            is_single, overlaps, num_warps=4, **launch_options(overlaps),
        )  # fmt: skip

    def update(
        self, qkv: Tensor, a: Tensor, b: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: Metadata
    ) -> Tensor:
        out = qkv.new_empty(len(qkv), self._spec.num_value_heads, self._spec.value_dim)
        if metadata.num_short:
            self._update_rows(qkv, a, b, parameters, state, metadata, out)
        if metadata.has_chunks:
            self._update_chunks(qkv, a, b, parameters, state, metadata, out)
        return out

    def _update_rows(
        self, qkv: Tensor, a: Tensor, b: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: Metadata,
        out: Tensor,
    ) -> None:  # fmt: skip
        spec, overlaps, buffers = self._spec, metadata.overlaps, metadata.buffers
        grid = (metadata.num_short, spec.num_value_heads, triton.cdiv(spec.value_dim, VALUES))
        metadata.launches(
            update_rows_kernel, grid,
            qkv, a, b, parameters.log_decay, parameters.bias, state.recurrent, state.log, out, buffers.groups,
            buffers.query_starts, buffers.positions, metadata.lag, a.stride(0), spec.num_key_heads,
            spec.num_value_heads, spec.key_dim, spec.value_dim, self._keys, VALUES, spec.most_tentative, overlaps,
            num_warps=4, **launch_options(overlaps),
        )  # fmt: skip

    def _update_chunks(
        self, qkv: Tensor, a: Tensor, b: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: Metadata,
        out: Tensor,
    ) -> None:  # fmt: skip
        spec, starts, first = self._spec, metadata.buffers.query_starts, metadata.num_single
        shape = (metadata.num_tokens, spec.num_value_heads)
        q, k, w = (qkv.new_empty(*shape, spec.key_dim) for _ in range(3))
        u, scores = qkv.new_empty(*shape, spec.value_dim), qkv.new_empty(*shape, CHUNK)
        since = qkv.new_empty(shape, dtype=torch.float32)
        metadata.launches(
            prepare_chunks_kernel, (metadata.num_tiles(CHUNK), spec.num_value_heads),
            qkv, a, b, parameters.log_decay, parameters.bias, starts, q, k, w, u, scores, since, a.stride(0),
            first, metadata.num_long, first, spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim,
            self._keys, self._values, CHUNK, CHUNK.bit_length() - 1, spec.most_tentative, num_warps=4,
            num_stages=1,
        )  # fmt: skip
        metadata.launches(
            update_chunks_kernel, (metadata.num_long, spec.num_value_heads, triton.cdiv(spec.value_dim, VALUES)),
            q, k, w, u, scores, since, state.recurrent, out, metadata.buffers.groups, starts, first, first,
            spec.num_value_heads, spec.key_dim, spec.value_dim, self._keys, VALUES, CHUNK, self._num_stages,
            spec.most_tentative, num_warps=4,
        )  # fmt: skip


def supports_delta(spec: DeltaSpec, device: torch.device, dtype: torch.dtype) -> bool:
    is_known = spec.dtype == dtype and dtype in (torch.bfloat16, torch.float16, torch.float32)
    return is_known and spec.key_dim <= 128 and spec.value_dim <= 128 and spec.width <= CONV_TOKENS
