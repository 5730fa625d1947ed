"""What stands in for AITER's native operations where they cannot run: each has exactly the recorded signature, checks
the types that are written in it, and does in torch what AITER's documentation says of the operation.

They show that our calls fit and that our side of the contract (layouts, shapes, what is in place) is right. They show
nothing of AITER's kernels.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SNAPSHOTS = sorted(Path(__file__).with_name("signatures").glob("*.json"))
KINDS = {"any": inspect.Parameter.POSITIONAL_OR_KEYWORD, "keyword": inspect.Parameter.KEYWORD_ONLY}
TYPES: dict[str, type | tuple[type, ...]] = {
    "Tensor": Tensor, "int": int, "float": (int, float), "str": str, "bool": bool, "dtype": torch.dtype,
}  # fmt: skip


@dataclass
class StandIns:
    """In place of `worker.kernels.aiter.package.operation`."""

    snapshot: Path
    called: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._signatures = json.loads(self.snapshot.read_text())

    def operation(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path == "aiter.tuned_gemm.tgemm":
            return _Namespace(mm=self._function("aiter.tuned_gemm.TunedGemm.mm", _mm))
        if name == "CustomAllreduce":
            return self._communicator(path)
        if path not in self._signatures:
            return None
        return self._function(path, MEANINGS[path])

    def _communicator(self, path: str) -> Any:
        if f"{path}.__init__" not in self._signatures:
            return None
        reduce = self._function(f"{path}.custom_all_reduce", lambda input, **_: 2 * input)
        return self._function(f"{path}.__init__", lambda **_: _Namespace(custom_all_reduce=reduce))

    def _function(self, path: str, meaning: Callable[..., Any]) -> Callable[..., Any]:
        records = self._signatures[path]
        signature = inspect.Signature(sorted(map(_parameter, records), key=lambda parameter: parameter.kind))

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            for record in records:
                if record["name"] in given:
                    _check(path, record, given[record["name"]])
            self.called.add(path)
            return meaning(**given)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call


@dataclass
class _Namespace:
    mm: Any = None
    custom_all_reduce: Any = None


def _parameter(record: dict[str, Any]) -> inspect.Parameter:
    default = record.get("default", inspect.Parameter.empty)
    return inspect.Parameter(record["name"], KINDS[record["kind"]], default=default)


def _check(path: str, record: dict[str, Any], value: Any) -> None:
    written = record.get("type", "")
    optional = written.startswith("Optional[")
    known = TYPES.get(written.removeprefix("Optional[").removesuffix("]") if optional else written)
    if known is not None and not (optional and value is None):
        assert isinstance(value, known), f"{path}: {record['name']} is {type(value).__name__}, not {written}"


# --- what the operations do


def _rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    assert input.dim() == 2
    return functional.rms_norm(input, weight.shape, weight, epsilon)


def _add_rms_norm(input: Tensor, residual_in: Tensor, weight: Tensor, epsilon: float) -> None:
    assert input.is_contiguous() and residual_in.is_contiguous()
    residual_in.add_(input)
    input.copy_(_rms_norm(residual_in, weight, epsilon))


def _silu_and_mul(out: Tensor, input: Tensor) -> None:
    gate, up = input.chunk(2, -1)
    out.copy_(functional.silu(gate) * up)


def _mm(inp: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(inp, weights, bias)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Neox rotation in place: x [T, heads, D], cos and sin [T, D / 2]."""
    first, second = x.float().chunk(2, -1)
    c, s = cos.float()[:, None], sin.float()[:, None]
    x.copy_(torch.cat((first * c - second * s, second * c + first * s), -1))


def _rope(
    cos: Tensor, sin: Tensor, positions: Tensor, rotate_style: int, reuse_freqs_front_part: bool, nope_first: bool,
    **xy: Tensor,
) -> None:  # fmt: skip
    assert (rotate_style, reuse_freqs_front_part, nope_first) == (0, True, False) and positions.dtype == torch.int64
    for x in xy.values():
        assert x.shape[:2] == positions.shape == (1, x.shape[1]) and cos.shape[1:] == (1, 1, x.shape[-1] // 2)
        _turn(x[0], cos[positions[0], 0, 0], sin[positions[0], 0, 0])


def _write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """[T, K, D] into [blocks, K, D / x, block_size, x] and [blocks, K, block_size / x, D, x]."""
    block_size, x = key_cache.shape[3:]
    assert slot_mapping.dtype == torch.int64
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            key_cache[block, :, :, offset] = key[token].unflatten(-1, (-1, x))
            value_cache[block, :, offset // x, :, offset % x] = value[token]


def _reshape_and_cache(kv_cache_dtype: str, asm_layout: bool, **tensors: Tensor) -> None:
    assert kv_cache_dtype == "auto" and asm_layout
    _write(**tensors)


def _fused_write(
    q: Tensor, k: Tensor, v: Tensor, num_heads_q: int, num_heads_k: int, num_heads_v: int, head_dim: int, eps: float,
    qw: Tensor, kw: Tensor, cos_sin_cache: Tensor, is_neox_style: bool, pos_ids: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    assert [x.shape[1:] for x in (q, k, v)] == [(heads, head_dim) for heads in (num_heads_q, num_heads_k, num_heads_v)]
    assert is_neox_style and kv_cache_dtype == "auto" and k_scale.dtype == v_scale.dtype == torch.float32
    cos, sin = cos_sin_cache[pos_ids].chunk(2, -1)
    for x, weight in ((q, qw), (k, kw)):
        x.copy_(functional.rms_norm(x, (head_dim,), weight, eps))
        _turn(x, cos, sin)
    _write(k, v, k_cache, v_cache, slot_mapping)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One row, causal, the last query at the last key: q [n, H, D], k and v [context, K, D]."""
    group = q.shape[1] // k.shape[1]
    hidden = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(group, 1)) * scale
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.float().repeat_interleave(group, 1)).to(q.dtype)


def _cached_rows(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lens: Tensor, query_len: int, scale: float
) -> Iterator[Tensor]:
    assert tables.dtype == lens.dtype == torch.int32 and q.is_contiguous() and len(q) == len(lens) * query_len
    for row, (table, context_len) in enumerate(zip(tables.long(), lens.tolist(), strict=True)):
        k = k_cache[table].permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[:context_len]
        v = v_cache[table].permute(0, 2, 4, 1, 3).flatten(0, 2)[:context_len]
        queries = q[row * query_len : (row + 1) * query_len]
        yield _attend(queries, k, v, scale) if context_len else torch.full_like(queries, torch.nan)


def _pa_fwd_asm(
    Q: Tensor, K: Tensor, V: Tensor, block_tables: Tensor, context_lens: Tensor, block_tables_stride0: int,
    out_: Tensor, max_qlen: int = 1, qo_indptr: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert K.shape[3] == 16 and Q.shape[2] == 128 and block_tables.stride(0) == block_tables_stride0
    assert (qo_indptr is None) == (max_qlen == 1) and (len(Q) == 1 or out_.stride() == Q.stride())
    if qo_indptr is not None:
        assert qo_indptr.tolist() == list(range(0, len(Q) + 1, max_qlen)) and Q.shape[1] // K.shape[1] <= 8
    rows = _cached_rows(Q, K, V, block_tables, context_lens, max_qlen, 128**-0.5)
    return torch.cat(list(rows), out=out_)


def _pa_decode_gluon(
    output: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, context_lengths: Tensor,
    block_tables: Tensor, softmax_scale: float, query_length: int, max_context_partition_num: int,
    compute_type: torch.dtype,
) -> None:  # fmt: skip
    assert key_cache.shape[3] in (16, 64, 1024) and query_length <= 4 and max_context_partition_num == 3
    assert compute_type == query.dtype
    rows = _cached_rows(
        query, key_cache, value_cache, block_tables, context_lengths, query_length, softmax_scale
    )  # fmt: skip
    torch.cat(list(rows), out=output)


def _flash_attn_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and causal
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert starts[0] == key_starts[0] == 0 and starts[-1] == len(q) and key_starts[-1] == len(k) == len(v)
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q and int(cu_seqlens_k.diff().max()) == max_seqlen_k
    bounds = zip(starts, starts[1:], key_starts, key_starts[1:], strict=False)
    return torch.cat([_attend(q[a:b], k[c:d], v[c:d], softmax_scale) for a, b, c, d in bounds])


MEANINGS: dict[str, Callable[..., Any]] = {
    "aiter.rms_norm": _rms_norm,
    "aiter.fused_add_rms_norm_cu": _add_rms_norm,
    "aiter.silu_and_mul": _silu_and_mul,
    "aiter.rope_cached_positions_2c_fwd_inplace": _rope,
    "aiter.reshape_and_cache": _reshape_and_cache,
    "aiter.fused_qk_norm_rope_cache_quant_shuffle": _fused_write,
    "aiter.flash_attn_varlen_func": _flash_attn_varlen,
    "aiter.pa_fwd_asm": _pa_fwd_asm,
    "aiter.ops.triton.gluon.pa_decode_gluon.pa_decode_gluon": _pa_decode_gluon,
    "aiter.ops.triton.gluon.pa_decode_gluon.get_recommended_splits": lambda num_sequences, num_kv_heads: 3,
}
