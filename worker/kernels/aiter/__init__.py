"""AMD's AITER: its HIP, CK and assembly kernels where they apply, its Triton kernels behind them.

What AITER has not, and compiles for AMD's GPUs, is taken from our own Triton kernels.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from worker.kernels.aiter import package
from worker.kernels.aiter.decode import GLUON, AssemblyDecode, GluonDecode
from worker.kernels.aiter.elementwise import TRITON_RMS_NORM, NativeRmsNorm, NativeSiluAndMul, TritonRmsNorm
from worker.kernels.aiter.linear import TRITON_GEMM, TritonLinear, TunedLinear
from worker.kernels.aiter.native_gqa import NativeGqa
from worker.kernels.aiter.reduce import COMMUNICATORS
from worker.kernels.aiter.triton_gqa import FUSED_CACHE, UNIFIED_ATTENTION, TritonGqa
from worker.kernels.interface import EMBEDDING, GQA, LINEAR, PREPARE_STEP, RMS_NORM, SILU_AND_MUL, GqaSpec, LinearSpec
from worker.kernels.select import Implementation
from worker.kernels.weights import Dense

Supports = Callable[[Any, torch.device, torch.dtype], bool]
DTYPES = (torch.float16, torch.bfloat16)


def _has(*operations: tuple[str, str], native: bool, suits: Callable[[Any], bool] = lambda _: True) -> Supports:
    """Whether this GPU and this release have all the operations, and they suit the spec."""

    def supports(spec: Any, device: torch.device, dtype: torch.dtype) -> bool:
        found = package.architecture(device)
        return (
            found is not None
            and (found in package.NATIVE_ARCHITECTURES or not native)
            and dtype in DTYPES
            and suits(spec)
            and all(package.operation(module, name) is not None for module, name in operations)
        )

    return supports


def _is_on_amd(spec: Any, device: torch.device, dtype: torch.dtype) -> bool:
    return package.architecture(device) is not None and importlib.util.find_spec("triton") is not None


def _our_own(module: str, name: str) -> Callable[..., Any]:
    """Imported where it is chosen: without a GPU there may be no Triton."""
    return lambda *_: vars(importlib.import_module(f"worker.kernels.triton.{module}"))[name]


def _is_dense(spec: LinearSpec) -> bool:
    return spec.kind is Dense


def _is_power_of_two(spec: GqaSpec) -> bool:
    return spec.head_dim & (spec.head_dim - 1) == 0 and 16 <= spec.head_dim <= 256


NORM = (("aiter", "rms_norm"), ("aiter", "fused_add_rms_norm_cu"), (COMMUNICATORS, "CustomAllreduce"))
PAGED = (
    ("aiter", "rms_norm"),
    ("aiter", "rope_cached_positions_2c_fwd_inplace"),
    ("aiter", "reshape_and_cache"),
    ("aiter", "flash_attn_varlen_func"),
)
GLUON_DECODE = ((GLUON, "pa_decode_gluon"), (GLUON, "get_recommended_splits"))
TRITON_NORM = ((TRITON_RMS_NORM, "rms_norm"), (TRITON_RMS_NORM, "rmsnorm2d_fwd_with_add"))
TRITON_PAGED = (
    *TRITON_NORM,
    (FUSED_CACHE, "fused_qk_rope_reshape_and_cache"),
    (UNIFIED_ATTENTION, "unified_attention"),
)

IMPLEMENTATIONS: list[Implementation[Any, Any]] = [
    Implementation(RMS_NORM, "aiter", _has(*NORM, native=True), lambda spec, device, _: NativeRmsNorm(device)),
    Implementation(
        RMS_NORM, "aiter Triton", _has(*TRITON_NORM, native=False), lambda *_: TritonRmsNorm()
    ),
    Implementation(
        SILU_AND_MUL, "aiter", _has(("aiter", "silu_and_mul"), native=True), lambda *_: NativeSiluAndMul()
    ),
    Implementation(SILU_AND_MUL, "triton", _is_on_amd, _our_own("elementwise", "silu_and_mul")),
    Implementation(EMBEDDING, "triton", _is_on_amd, _our_own("elementwise", "embedding")),
    Implementation(PREPARE_STEP, "triton", _is_on_amd, _our_own("prepare", "prepare_step")),
    Implementation(
        LINEAR, "aiter tuned", _has(("aiter.tuned_gemm", "tgemm"), native=True, suits=_is_dense),
        lambda *_: TunedLinear(),
    ),
    Implementation(
        LINEAR, "aiter Triton", _has((TRITON_GEMM, "gemm_a16w16"), native=False, suits=_is_dense),
        lambda *_: TritonLinear(),
    ),
    Implementation(
        GQA, "aiter assembly", _has(*PAGED, ("aiter", "pa_fwd_asm"), native=True, suits=AssemblyDecode.suits),
        lambda spec, device, _: NativeGqa(spec, device, AssemblyDecode(spec)),
    ),
    Implementation(
        GQA, "aiter gluon",
        _has(*PAGED, *GLUON_DECODE, native=True, suits=GluonDecode.suits),
        lambda spec, device, _: NativeGqa(spec, device, GluonDecode(spec)),
    ),
    Implementation(
        GQA, "aiter Triton", _has(*TRITON_PAGED, native=False, suits=_is_power_of_two),
        lambda spec, device, _: TritonGqa(spec, device),
    ),
]  # fmt: skip
"""For an operation those of most preference first; what none of them supports, another backend carries out."""
