"""AMD's AITER: its HIP, CK and assembly kernels where they apply, its Triton kernels behind them.

What AITER has not, and compiles for AMD's GPUs, is taken from our own Triton kernels.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch

from worker.kernels.aiter import package
from worker.kernels.aiter.decode import AssemblyDecode, GluonDecode
from worker.kernels.aiter.elementwise import NativeRmsNorm, NativeSiluAndMul, TritonRmsNorm
from worker.kernels.aiter.linear import CONFIGURED_ARCHITECTURES, TritonLinear, TunedLinear
from worker.kernels.aiter.native_gqa import NativeGqa
from worker.kernels.aiter.triton_gqa import TritonGqa
from worker.kernels.elementwise import EMBEDDING, GATED_ACTIVATION, RMS_NORM, ActivationSpec, NormSpec
from worker.kernels.gqa import GQA
from worker.kernels.linear import LINEAR, LinearSpec
from worker.kernels.operation import Implementation, always
from worker.kernels.prepare import PREPARE_STEP
from worker.kernels.sampling import CHOOSE, LOGPROBS, MASKED_COPY
from worker.kernels.weights import Dense

Supports = Callable[[Any, torch.device, torch.dtype], bool]
DTYPES = (torch.float16, torch.bfloat16)


def _is_native(architecture: str) -> bool:
    return architecture in package.NATIVE_ARCHITECTURES


def _has(
    needs: Iterable[package.Need],
    suits: Callable[[Any], bool] = always,
    on: Callable[[str], bool] = _is_native,
) -> Supports:
    """Whether this GPU is one of those, this release has all that is needed, and the spec suits."""

    def supports(spec: Any, device: torch.device, dtype: torch.dtype) -> bool:
        architecture = package.architecture(device)
        return (
            architecture is not None
            and on(architecture)
            and dtype in DTYPES
            and suits(spec)
            and all(package.operation(module, name) is not None for module, name in needs)
        )

    return supports


def _is_on_amd(spec: Any, device: torch.device, dtype: torch.dtype) -> bool:
    return package.architecture(device) is not None and importlib.util.find_spec("triton") is not None


def _our_own(module: str, name: str) -> Callable[..., Any]:
    """Imported where it is chosen: without a GPU there may be no Triton."""
    return lambda *_: vars(importlib.import_module(f"worker.kernels.triton.{module}"))[name]


def _ours_on(module: str, name: str) -> Callable[..., Any]:
    """As `_our_own`, of a class that wants to know the machine."""

    def make(_spec: object, device: torch.device, _dtype: object) -> Any:
        from worker.kernels.triton.machine import machine_of

        return _our_own(module, name)()(machine_of(device))

    return make


def _our_gated_activation(spec: ActivationSpec, device: torch.device, _dtype: object) -> Any:
    from worker.kernels.triton.elementwise import TritonGatedActivation
    from worker.kernels.triton.machine import machine_of

    return TritonGatedActivation(spec.kind, machine_of(device))


def _has_plain_weight(spec: NormSpec) -> bool:
    return not spec.has_float32_weight


def _is_silu(spec: ActivationSpec) -> bool:
    return spec.kind == "silu"


def _is_dense(spec: LinearSpec) -> bool:
    return spec.kind is Dense


def _paged(decode: type[AssemblyDecode] | type[GluonDecode], name: str) -> Implementation[Any, Any]:
    return Implementation(
        GQA, name, _has((*NativeGqa.NEEDS, *decode.NEEDS), decode.suits),
        lambda spec, device, _: NativeGqa(spec, device, decode(spec)),
    )  # fmt: skip


COMPILER = None
"""Kernels are compiled at their first launch: nothing else was ever tried on such a GPU."""

IMPLEMENTATIONS: list[Implementation[Any, Any]] = [
    Implementation(
        RMS_NORM, "aiter", _has(NativeRmsNorm.NEEDS, _has_plain_weight), lambda _, device, __: NativeRmsNorm(device)
    ),
    Implementation(
        RMS_NORM, "aiter Triton", _has(TritonRmsNorm.NEEDS, _has_plain_weight, always), lambda *_: TritonRmsNorm()
    ),
    Implementation(GATED_ACTIVATION, "aiter", _has(NativeSiluAndMul.NEEDS, _is_silu), lambda *_: NativeSiluAndMul()),
    Implementation(GATED_ACTIVATION, "triton", _is_on_amd, _our_gated_activation),
    Implementation(EMBEDDING, "triton", _is_on_amd, _ours_on("elementwise", "TritonEmbedding")),
    Implementation(PREPARE_STEP, "triton", _is_on_amd, _ours_on("prepare", "TritonPrepare")),
    Implementation(CHOOSE, "triton", _is_on_amd, _ours_on("sample", "TritonChoose")),
    Implementation(MASKED_COPY, "triton", _is_on_amd, _our_own("sample_logprobs", "masked_copy")),
    Implementation(LOGPROBS, "triton", _is_on_amd, _our_own("sample_logprobs", "token_logprobs")),
    Implementation(LINEAR, "aiter tuned", _has(TunedLinear.NEEDS, _is_dense), lambda *_: TunedLinear()),
    Implementation(
        LINEAR, "aiter Triton", _has(TritonLinear.NEEDS, _is_dense, CONFIGURED_ARCHITECTURES.__contains__),
        lambda *_: TritonLinear(),
    ),
    _paged(AssemblyDecode, "aiter assembly"),
    _paged(GluonDecode, "aiter gluon"),
    Implementation(
        GQA, "aiter Triton", _has(TritonGqa.NEEDS, TritonGqa.suits, always),
        lambda spec, device, _: TritonGqa(spec, device),
    ),
]  # fmt: skip
"""For an operation those of most preference first; what none of them supports, another backend carries out."""
