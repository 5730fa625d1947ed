"""Decode over the shuffled cache: assembly where its shape is the one that was written, gluon for the others."""

import math
from typing import ClassVar

from torch import Tensor

from worker.kernels.aiter.package import Need, required
from worker.kernels.aiter.paged import StepViews
from worker.kernels.gqa import GqaCache, GqaSpec, is_plain
from worker.kernels.operation import KernelBackendError

ASSEMBLY_HEAD_DIM = 128
ASSEMBLY_BLOCK = 16
ASSEMBLY_GROUPS, ASSEMBLY_GROUPS_OF_DRAFTS = 16, 8
"""Query heads of a key head at most, for one query a row and for several."""
GLUON = "aiter.ops.triton.gluon.pa_decode_gluon"
GLUON_HEAD_DIMS = (64, 128)
GLUON_BLOCKS = (16, 64, 1024)
GLUON_QUERIES, GLUON_GROUP = 4, 64
"""Queries of a row, and queries × heads of a key head, at most."""


def sees_all(spec: GqaSpec) -> bool:
    """Neither a window nor sinks: assembly has none, and releases of gluon differ in where a window begins. A cache of
    float8 was never tried."""
    return spec.dtype.itemsize == 2 and spec.window is None and not spec.has_sinks and is_plain(spec)


class AssemblyDecode:
    NEEDS: ClassVar[tuple[Need, ...]] = (("aiter", "pa_fwd_asm"),)

    @staticmethod
    def suits(spec: GqaSpec) -> bool:
        """The kernel scales by head_dim ** −0.5 and takes no other scale."""
        return (
            sees_all(spec)
            and spec.head_dim == ASSEMBLY_HEAD_DIM
            and math.isclose(spec.scale, spec.head_dim**-0.5)
            and spec.num_heads // spec.num_kv_heads <= ASSEMBLY_GROUPS
        )

    def __init__(self, spec: GqaSpec) -> None:
        self._group = spec.num_heads // spec.num_kv_heads
        self._attention = required("aiter", "pa_fwd_asm")

    def check(self, block_size: int) -> None:
        _check_block_size("assembly", block_size, (ASSEMBLY_BLOCK,))

    def check_step(self, uniform_len: int) -> None:
        if uniform_len > 1 and self._group > ASSEMBLY_GROUPS_OF_DRAFTS:
            raise KernelBackendError(
                f"AITER's assembly attention verifies drafts of at most {ASSEMBLY_GROUPS_OF_DRAFTS} query heads a key "
                f"head; here are {self._group}: use --kernel-backend torch"
            )

    def __call__(self, q: Tensor, cache: GqaCache, views: StepViews, out: Tensor) -> None:
        rows, length = views.step.num_uniform_rows, views.step.uniform_len
        self._attention(
            q, cache.k, cache.v, views.block_tables[:rows], views.context_lens[:rows], views.block_tables.stride(0),
            max_qlen=length, out_=out, qo_indptr=views.query_starts[: rows + 1] if length > 1 else None,
        )  # fmt: skip


class GluonDecode:
    NEEDS: ClassVar[tuple[Need, ...]] = ((GLUON, "pa_decode_gluon"), (GLUON, "get_recommended_splits"))

    @staticmethod
    def suits(spec: GqaSpec) -> bool:
        return (
            sees_all(spec) and spec.head_dim in GLUON_HEAD_DIMS and spec.num_heads // spec.num_kv_heads <= GLUON_GROUP
        )

    def __init__(self, spec: GqaSpec) -> None:
        self._spec = spec
        self._attention = required(GLUON, "pa_decode_gluon")
        self._num_parts = required(GLUON, "get_recommended_splits")

    def check(self, block_size: int) -> None:
        _check_block_size("gluon", block_size, GLUON_BLOCKS)

    def check_step(self, uniform_len: int) -> None:
        longest = min(GLUON_QUERIES, GLUON_GROUP * self._spec.num_kv_heads // self._spec.num_heads)
        if uniform_len > longest:
            raise KernelBackendError(
                f"AITER's gluon attention verifies at most {longest} tokens a row, not {uniform_len}: "
                "use --kernel-backend torch"
            )

    def __call__(self, q: Tensor, cache: GqaCache, views: StepViews, out: Tensor) -> None:
        rows = views.step.num_uniform_rows
        self._attention(
            out, q, cache.k, cache.v, views.context_lens[:rows], views.block_tables[:rows], self._spec.scale,
            views.step.uniform_len, self._num_parts(rows, self._spec.num_kv_heads), compute_type=q.dtype,
        )  # fmt: skip


def _check_block_size(kind: str, block_size: int, known: tuple[int, ...]) -> None:
    if block_size not in known:
        raise KernelBackendError(
            f"AITER's {kind} attention has blocks of {' or '.join(map(str, known))} tokens, not {block_size}: "
            "use another --block-size, or --kernel-backend torch"
        )
