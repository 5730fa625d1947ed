"""Operations for NVIDIA GPUs in Triton. On a CPU they run through Triton's interpreter, for tests."""

from typing import Any

import torch

from worker.kernels.delta import DELTA, GATED_NORM
from worker.kernels.elementwise import EMBEDDING, GATED_ACTIVATION, RMS_NORM, NormSpec
from worker.kernels.experts import EXPERTS, ROUTE_EXPERTS
from worker.kernels.gqa import GQA
from worker.kernels.linear import LINEAR
from worker.kernels.mla import MLA
from worker.kernels.operation import Implementation, always
from worker.kernels.prepare import PREPARE_STEP, REMEMBER
from worker.kernels.sampling import BEST_OF_RANKS, CHOOSE, LOGPROBS, MASKED_COPY
from worker.kernels.triton.ahead import CompileAhead
from worker.kernels.triton.delta import TritonDelta, supports_delta
from worker.kernels.triton.elementwise import WIDEST_NORM, TritonEmbedding, TritonGatedActivation, TritonRmsNorm
from worker.kernels.triton.experts import TritonExperts, supports_experts
from worker.kernels.triton.gated_norm import TritonGatedNorm
from worker.kernels.triton.gqa import TritonGqa, supports_gqa
from worker.kernels.triton.linear import TritonLinear, supports_linear
from worker.kernels.triton.linear_grouped import TritonGroupedLinear, supports_grouped_linear
from worker.kernels.triton.machine import machine_of
from worker.kernels.triton.mla import TritonMla, supports_mla
from worker.kernels.triton.prepare import TritonPrepare, TritonRemember
from worker.kernels.triton.route import TritonRoute
from worker.kernels.triton.sample import TritonChoose
from worker.kernels.triton.sample_logprobs import masked_copy, token_logprobs
from worker.kernels.triton.sample_ranks import TritonBestOfRanks


def _supports_norm(spec: NormSpec, device: torch.device, dtype: torch.dtype) -> bool:
    return spec.size <= WIDEST_NORM


COMPILER = CompileAhead
IMPLEMENTATIONS: list[Implementation[Any, Any]] = [
    Implementation(
        RMS_NORM, "triton", _supports_norm, lambda spec, device, _: TritonRmsNorm(spec.size, machine_of(device))
    ),
    Implementation(
        GATED_ACTIVATION,
        "triton",
        always,
        lambda spec, device, _: TritonGatedActivation(spec.kind, machine_of(device)),
    ),
    Implementation(EMBEDDING, "triton", always, lambda _, device, *__: TritonEmbedding(machine_of(device))),
    Implementation(
        LINEAR, "triton", supports_linear, lambda spec, device, dtype: TritonLinear(spec, machine_of(device), dtype)
    ),
    Implementation(
        LINEAR,
        "triton",
        supports_grouped_linear,
        lambda spec, device, _: TritonGroupedLinear(spec, machine_of(device)),
    ),
    Implementation(ROUTE_EXPERTS, "triton", always, lambda spec, device, _: TritonRoute(spec, machine_of(device))),
    Implementation(
        EXPERTS, "triton", supports_experts, lambda spec, device, dtype: TritonExperts(spec, machine_of(device), dtype)
    ),
    Implementation(GQA, "triton", supports_gqa, lambda spec, device, dtype: TritonGqa(spec, machine_of(device), dtype)),
    Implementation(MLA, "triton", supports_mla, lambda spec, device, _: TritonMla(spec, machine_of(device))),
    Implementation(
        DELTA, "triton", supports_delta, lambda spec, device, dtype: TritonDelta(spec, machine_of(device), dtype)
    ),
    Implementation(GATED_NORM, "triton", always, lambda _, device, *__: TritonGatedNorm(machine_of(device))),
    Implementation(PREPARE_STEP, "triton", always, lambda _, device, *__: TritonPrepare(machine_of(device))),
    Implementation(REMEMBER, "triton", always, lambda _, device, *__: TritonRemember(machine_of(device))),
    Implementation(CHOOSE, "triton", always, lambda _, device, *__: TritonChoose(machine_of(device))),
    Implementation(BEST_OF_RANKS, "triton", always, lambda _, device, *__: TritonBestOfRanks(machine_of(device))),
    Implementation(MASKED_COPY, "triton", always, lambda *_: masked_copy),
    Implementation(LOGPROBS, "triton", always, lambda *_: token_logprobs),
]
