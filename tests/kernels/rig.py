"""A backend's kernels in one dtype, and rows of a step for its attention, with their exact results."""

import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.kernels.gqa import GQA, GqaSpec
from worker.kernels.native.library import obstacle
from worker.kernels.operation import KernelT, Operation, SpecT
from worker.kernels.select import Kernels
from worker.kernels.step import Chunk, Step, StepBuffers

CPU = torch.device("cpu")
HAS_NATIVE = obstacle() is None
"""A machine without a compiler has torch's kernels alone."""
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if IS_INTERPRETED:
    BACKENDS = [("triton", "cpu")]
else:
    ON_GPU = [("torch", "cuda"), ("triton", "cuda")] if torch.cuda.is_available() else []
    BACKENDS = [("torch", "cpu"), *([("native", "cpu")] if HAS_NATIVE else []), *ON_GPU]
"""A new backend joins here."""
DTYPES = [torch.float32, torch.float16 if IS_INTERPRETED else torch.bfloat16]
"""Triton's interpreter cannot compute in bfloat16."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
PAIRS_TOLERANCE = 6e-3
"""Of attention that rounds queries and weights to bfloat16: twice that of one number."""
INT8_TOLERANCE = 3e-4
"""Of attention over int8, whose queries are rounded as `rounded_to_int8` has it: weights lose 2^-16 of the largest, and
powers of two 8e-5."""
SCALE = 0.3
FP8_SMALLEST = 2**-6
"""Of those with all their bits."""
FP8_NAN = 0x7F
"""NaN in float8_e4m3, as a byte."""


@dataclass(frozen=True)
class Rig:
    """A backend's kernels in one dtype."""

    kernels: Kernels
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.kernels.device

    def choose(self, operation: Operation[SpecT, KernelT], spec: SpecT) -> KernelT:
        return self.kernels.choose(operation, spec, self.dtype)

    def noise(self, *shape: int, seed: int = 0) -> Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return values.to(self.device, self.dtype)

    def assert_close(self, got: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
        """Error relative to the largest expected value; by default no more than the type has."""
        assert got.shape == expected.shape and got.dtype == self.dtype
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < (tolerance or TOLERANCE[self.dtype])


def rounded_to_int8(values: Tensor) -> Tensor:
    """float64 [..., D]: whole numbers up to 127 times a scale for each D, a float."""
    largest = values.float().abs().amax(-1, keepdim=True).clamp_min(1e-15)
    whole = (values.float() * (127 / largest)).round()
    return whole.double() * (largest / 127).double()


@dataclass(frozen=True)
class Row:
    num_tokens: int
    context_len: int
    """0: a row of padding."""
    table: list[int]

    def token_slots(self, block_size: int) -> list[int]:
        if not self.context_len:
            return [-1] * self.num_tokens
        return [self.table[p // block_size] * block_size + p % block_size for p in self.positions]

    @property
    def positions(self) -> range:
        """Of padding as `prepare_step` has them: those of the spare slot."""
        before = self.context_len - self.num_tokens if self.context_len else 0
        return range(before, before + self.num_tokens)


def scatter(
    query_lens: list[int], context_lens: list[int], block_size: int, uniform_len: int, num_padding: int
) -> tuple[list[Row], int, int]:
    """(rows, how many are uniform but for padding, blocks but for the spare one): blocks far apart and out of order.

    Those at the front with `uniform_len` tokens are uniform, with `num_padding` rows after them.
    """
    counts = [-(-n // block_size) for n in context_lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(4)).tolist()
    rows = [
        Row(num_tokens, context_len, [order.pop() for _ in range(count)])
        for num_tokens, context_len, count in zip(query_lens, context_lens, counts, strict=True)
    ]
    num_uniform = next((i for i, row in enumerate(rows) if row.num_tokens != uniform_len), len(rows))
    padding = [Row(uniform_len, 0, [num_blocks])] * num_padding
    return rows[:num_uniform] + padding + rows[num_uniform:], num_uniform, num_blocks


def buffers_for(rows: list[Row], num_blocks: int, device: torch.device) -> StepBuffers:
    """For these rows, and for a step of their histories."""
    num_tokens = max(sum(row.num_tokens for row in rows), sum(row.context_len for row in rows))
    return StepBuffers.allocate(num_tokens, len(rows), max(len(row.table) for row in rows) + 2, num_blocks, device)


def fill_step(
    buffers: StepBuffers, rows: list[Row], num_uniform: int, uniform_len: int, num_padding: int, block_size: int
) -> Step:
    """As `prepare_step` would fill the buffers."""
    lens = torch.tensor([row.num_tokens for row in rows])
    num_tokens = int(lens.sum())
    buffers.query_starts[1 : len(rows) + 1] = lens.cumsum(0)
    buffers.positions[:num_tokens] = torch.tensor([p for row in rows for p in row.positions])
    buffers.token_slots[:num_tokens] = torch.tensor([slot for row in rows for slot in row.token_slots(block_size)])
    buffers.context_lens[: len(rows)] = torch.tensor([row.context_len for row in rows])
    for i, row in enumerate(rows):
        buffers.block_tables[i, : len(row.table)] = torch.tensor(row.table)
    chunks = rows[num_uniform + num_padding :]
    return Step(
        num_uniform_rows=num_uniform + num_padding,
        uniform_len=uniform_len,
        chunks=tuple(Chunk(row.num_tokens, row.context_len) for row in chunks),
        max_context_len=max(row.context_len for row in rows),
        num_padding_rows=num_padding,
    )


class Rows:
    """Rows of a step with random qkv, and a cache with their histories scattered over blocks, `garbage` elsewhere.

    Those at the front with `uniform_len` tokens are uniform, with `num_padding` rows after them; the others are chunks.
    """

    def __init__(
        self,
        rig: Rig,
        shape: tuple[int, int, int],
        query_lens: list[int],
        context_lens: list[int],
        block_size: int,
        *,
        uniform_len: int = 1,
        num_padding: int = 0,
        scale: float = SCALE,
        window: int | None = None,
        has_sinks: bool = False,
        value_dim: int | None = None,
        garbage: float = torch.nan,
        cache_scales: tuple[float, float] | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`value_dim`: None, as of keys; `cache_scales`: of keys and of values, in a cache of float8; `cache_dtype`:
        where there are none; None: as of activations."""
        self.rig, self.block_size = rig, block_size
        self.heads, self.kv_heads, self.head_dim = shape
        self.value_dim = value_dim or self.head_dim
        self.cache_scales = cache_scales
        kept = (cache_dtype or rig.dtype) if cache_scales is None else torch.float8_e4m3fn
        self.spec = GqaSpec(*shape, scale, kept, window, has_sinks, value_dim)
        self.sinks = rig.noise(self.heads, seed=3) if has_sinks else None
        self.kernel = rig.choose(GQA, self.spec)
        self.rows, num_uniform, num_blocks = scatter(query_lens, context_lens, block_size, uniform_len, num_padding)
        pool = self.kernel.allocate(2, num_blocks + 1, block_size, rig.device)
        for entry in pool.entries:
            assert len(entry) == num_blocks + 1
            if kept == torch.int8:
                entry.fill_(-1)  # scales of NaN
            elif cache_scales is None:
                entry.fill_(garbage)
            else:
                entry.view(torch.uint8).fill_(FP8_NAN)
        self.entries, self.cache = pool.entries, pool.layers[1]
        if cache_scales is not None:
            self.cache = replace(self.cache, k_scale=cache_scales[0], v_scale=cache_scales[1])
        num_tokens = sum(row.num_tokens for row in self.rows)
        self.buffers = buffers_for(self.rows, num_blocks, rig.device)
        # The histories, written by a step of their own; then the step itself.
        before = [Row(n, n, row.table) for row in self.rows if (n := row.context_len - row.num_tokens) > 0]
        self.history = self._noise(sum(row.num_tokens for row in before), seed=2)
        if before:
            _, metadata = self._prepare(before, 0)
            self.kernel.write_qkv(self.history.clone(), None, None, self.cache, metadata)
        self.before = [entry.clone() for entry in self.entries]
        self.step, self.metadata = self._prepare(self.rows, num_uniform, uniform_len, num_padding)
        self.qkv = self._noise(num_tokens, seed=1)
        self.q, self.k, self.v = self.kernel.write_qkv(self.qkv.clone(), None, None, self.cache, self.metadata)

    def _noise(self, num_tokens: int, seed: int) -> Tensor:
        width = (self.heads + self.kv_heads) * self.head_dim + self.kv_heads * self.value_dim
        values = self.rig.noise(num_tokens, width, seed=seed)
        if IS_INTERPRETED and self.cache_scales is not None:
            # Triton's interpreter rounds to float8 in a way of its own: numbers that need no rounding.
            values = torch.where(values.abs() < FP8_SMALLEST, 0, values).to(torch.float8_e4m3fn).to(values.dtype)
        return values

    def _prepare(
        self, rows: list[Row], num_uniform: int, uniform_len: int = 1, num_padding: int = 0
    ) -> tuple[Step, object]:
        step = fill_step(self.buffers, rows, num_uniform, uniform_len, num_padding, self.block_size)
        return step, self.kernel.prepare(step, self.buffers, self.block_size)

    @property
    def _is_real(self) -> Tensor:
        """bool [T]: not padding."""
        return torch.tensor([row.context_len > 0 for row in self.rows for _ in range(row.num_tokens)])

    def by_head(self, qkv: Tensor) -> list[Tensor]:
        """Queries, keys and values in float64, each [T, heads, D]."""
        shapes = (self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.value_dim)
        parts = qkv.double().split([heads * dim for heads, dim in shapes], 1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

    def exact(self) -> Tensor:
        """Causal attention in float64, of all tokens but padding: [T, H × value_dim]."""
        group = self.heads // self.kv_heads
        old, new = self.by_head(self.history), self.by_head(self.qkv)
        outs, old_at, new_at = [], 0, 0
        for row in self.rows:
            q_len, before = row.num_tokens, max(0, row.context_len - row.num_tokens)
            if row.context_len:
                k, v = (
                    torch.cat((old[i][old_at : old_at + before], new[i][new_at : new_at + q_len])).repeat_interleave(
                        group, 1
                    )
                    for i in (1, 2)
                )
                q = new[0][new_at : new_at + q_len]
                if self.spec.dtype == torch.int8:
                    q = rounded_to_int8(q)
                outs.append(self._exact_row(q, self.as_cached(k, 0), self.as_cached(v, 1)))
            old_at, new_at = old_at + before, new_at + q_len
        return torch.cat(outs).flatten(1)

    def as_cached(self, values: Tensor, which: int) -> Tensor:
        """Keys (0) or values (1), float64, as the cache has them."""
        if self.spec.dtype == torch.int8:
            return rounded_to_int8(values)
        if self.cache_scales is None:
            return values.to(self.spec.dtype).double()
        scale = self.cache_scales[which]
        return (values.float() / scale).to(torch.float8_e4m3fn).double() * scale

    def _exact_row(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = torch.arange(len(k), device=q.device)
        queries = keys[len(k) - len(q) :, None]
        hidden = keys > queries
        if self.spec.window is not None:
            hidden |= keys <= queries - self.spec.window
        scores = torch.einsum("qhd,khd->hqk", q, k).mul(self.spec.scale).masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            column = self.sinks.double()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, column), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)

    def attend(self) -> Tensor:
        """Of all tokens but padding."""
        return self.kernel.attend(self.q, self.k, self.v, self.cache, self.metadata, self.sinks)[self._is_real]
