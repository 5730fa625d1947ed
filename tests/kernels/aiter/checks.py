"""One check for each operation of the aiter backend, against float64. The same with stand-ins, through the interpreter,
on an NVIDIA GPU and on an AMD GPU."""

import torch
from torch import Tensor

from tests.kernels.rig import Rig, Rows
from worker.kernels.aiter.paged import StepViews
from worker.kernels.elementwise import GATED_ACTIVATION, RMS_NORM, ActivationSpec, NormSpec, RopeTable
from worker.kernels.gqa import GQA, QkNorm
from worker.kernels.linear import LINEAR, LinearSpec
from worker.kernels.select import Kernels
from worker.kernels.weights import Dense
from worker.parallel.group import Group

Shape = tuple[int, int, int]
"""(heads, kv heads, head_dim)"""

GARBAGE = 1e3
"""In the cache where nothing was written. AITER's kernels read blocks whole, so that it has to be finite: see
`worker.kernels.aiter.paged`."""


def rms_norm(rig: Rig) -> None:
    """Of rows, and of some of the heads of rows."""
    kernel, weight = rig.choose(RMS_NORM, NormSpec(96)), rig.noise(96, seed=1)
    for x in (rig.noise(5, 96), rig.noise(3, 6, 96)[:, 2:4]):
        rig.assert_close(kernel.norm(x, weight, 1e-5), _normed(x.double(), weight))


def add_rms_norm(rig: Rig) -> None:
    x, residual, weight = rig.noise(5, 96), rig.noise(5, 96, seed=1), rig.noise(96, seed=2)
    total = x.double() + residual.double()
    normed, same = rig.choose(RMS_NORM, NormSpec(96)).add_norm(x, residual, weight, 1e-5, Group())
    assert same.data_ptr() == residual.data_ptr()
    rig.assert_close(residual, total)
    rig.assert_close(normed, _normed(total, weight))


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def silu_and_mul(rig: Rig) -> None:
    x = rig.noise(5, 128)
    gate, up = x.double().chunk(2, -1)
    rig.assert_close(rig.choose(GATED_ACTIVATION, ActivationSpec(64))(x), gate * gate.sigmoid() * up)


def linear(rig: Rig) -> None:
    """With and without a bias, into a new tensor and a given one."""
    x, weight, bias = rig.noise(3, 96), rig.noise(131, 96, seed=1), rig.noise(131, seed=2)
    product = x.double() @ weight.double().T
    kernel = rig.choose(LINEAR, LinearSpec(96, 131))
    rig.assert_close(kernel(x, kernel.pack(Dense(weight))), product)
    packed, out = kernel.pack(Dense(weight, bias)), torch.empty(3, 131, dtype=rig.dtype, device=rig.device)
    assert kernel(x, packed, out).data_ptr() == out.data_ptr()
    rig.assert_close(out, product + bias.double())


def mixed_step(rig: Rig, shape: Shape, **kind: object) -> None:
    """A row that decodes, padding, a chunk without a prefix and one whose prefix ends inside a block; and chunks alone,
    without a prefix."""
    for query_lens, context_lens, num_padding in (([1, 5, 3], [18, 5, 21], 1), ([4, 2], [4, 2], 0)):
        _attend(rig, shape, query_lens, context_lens, num_padding=num_padding, **kind)


def uniform_rows(rig: Rig, shape: Shape, uniform_len: int, **kind: object) -> None:
    """With padding, which writes nothing: of the cache outside of the spare block, the rows' tokens alone change."""
    rows = _attend(
        rig, shape, [uniform_len] * 2, [7, 18], uniform_len=uniform_len, num_padding=2, **kind
    )  # fmt: skip
    for before, after in zip(rows.before, rows.entries, strict=True):
        values = rows.spec.num_kv_heads * rows.spec.head_dim
        assert (before != after)[: rows.buffers.spare_block].sum() == 2 * uniform_len * values


def _attend(rig: Rig, shape: Shape, query_lens: list[int], context_lens: list[int], **more: object) -> Rows:
    rows = rows_of(rig, shape, query_lens, context_lens, **more)
    rig.assert_close(rows.attend(), rows.exact())
    return rows


def rows_of(rig: Rig, shape: Shape, query_lens: list[int], context_lens: list[int], **more: object) -> Rows:
    return Rows(rig, shape, query_lens, context_lens, 16, scale=shape[2] ** -0.5, garbage=GARBAGE, **more)  # type: ignore[arg-type]


def norm_and_rope(rig: Rig, shape: Shape, with_norm: bool, with_rope: bool) -> Rows:
    """Queries, keys and values as torch has them; returns rows whose keys and values were written."""
    rows, dim = rows_of(rig, shape, [1, 3], [4, 3]), shape[2]
    norm = QkNorm(rig.noise(dim, seed=5), rig.noise(dim, seed=6), 1e-5) if with_norm else None
    angles = torch.arange(10)[:, None] * torch.linspace(1, 0.1, dim // 2)
    c, s = angles.cos(), angles.sin()
    tables = (torch.cat(pair, -1).to(rig.device, rig.dtype) for pair in ((c, c), (-s, s)))
    rope = RopeTable(*tables) if with_rope else None
    rows.q, rows.k, rows.v = rows.kernel.write_qkv(rows.qkv.clone(), norm, rope, rows.cache, rows.metadata)
    torch_kernel = Kernels(rig.device, "torch").choose(GQA, rows.spec, rig.dtype)
    cache = torch_kernel.allocate(1, rows.buffers.spare_block + 1, 16, rig.device).layers[0]
    metadata = torch_kernel.prepare(rows.step, rows.buffers, 16)
    expected = torch_kernel.write_qkv(rows.qkv.clone(), norm, rope, cache, metadata)
    for mine, theirs in zip((rows.q, rows.k, rows.v), expected, strict=True):
        rig.assert_close(mine.contiguous(), theirs.double())
    return rows


def what_is_not_a_number_is_not_written(rig: Rig, shape: Shape) -> None:
    rows = rows_of(rig, shape, [1], [1])
    rows.kernel.write_qkv(torch.full_like(rows.qkv, torch.nan), None, None, rows.cache, rows.metadata)
    assert rows.cache.v.isfinite().all() and rows.cache.k.isfinite().all()


def uniform_rows_are_views_of_the_buffers(rig: Rig, shape: Shape) -> None:
    """Or a captured graph would go on with the values of the step that it was captured with."""
    rows = rows_of(rig, shape, [1, 1], [7, 18])
    assert rows.kernel.graph_contexts(4, 100) == (100,)
    views = rows.metadata if isinstance(rows.metadata, StepViews) else rows.metadata.views
    for name in ("positions", "token_slots", "query_starts", "context_lens", "block_tables"):
        assert getattr(views, name).data_ptr() == getattr(rows.buffers, name).data_ptr()
