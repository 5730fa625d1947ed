"""What both kinds of AITER's attention share: views of a step's buffers, and of its queries, keys and values."""

from dataclasses import dataclass

from torch import Tensor

from worker.kernels.gqa import GqaSpec
from worker.kernels.step import Step, StepBuffers


@dataclass(frozen=True, slots=True)
class StepViews:
    """Views of the buffers alone, so that a captured graph finds the next step's values in them."""

    step: Step
    positions: Tensor
    """int64 [T]"""
    token_slots: Tensor
    """int64 [T]; −1 writes nothing"""
    query_starts: Tensor
    """int32 [R + 1]"""
    context_lens: Tensor
    """int32 [R]"""
    block_tables: Tensor
    """int32 [R, most blocks]"""


def step_views(step: Step, buffers: StepBuffers) -> StepViews:
    return StepViews(
        step=step,
        positions=buffers.positions[: step.num_tokens],
        token_slots=buffers.token_slots[: step.num_tokens],
        query_starts=buffers.query_starts[: step.num_rows + 1],
        context_lens=buffers.context_lens[: step.num_rows],
        block_tables=buffers.block_tables[: step.num_rows],
    )


def split_qkv(qkv: Tensor, spec: GqaSpec) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (H + 2K) × D] → views [T, H, D], [T, K, D], [T, K, D]; keys and values are finite after it, in place.

    AITER's kernels read blocks whole, with weight 0 what a row does not see: a NaN that an earlier owner of the block
    left there would be everyone's who gets it. So none is written, and caches are cleared when they are allocated. A
    row of NaN is still found out, by its queries.
    """
    qkv[:, spec.num_heads * spec.head_dim :].nan_to_num_()
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    q, k, v = qkv.unflatten(-1, (sum(heads), spec.head_dim)).split(heads, 1)
    return q, k, v
