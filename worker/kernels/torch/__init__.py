"""Every operation in plain torch: the reference, right on every device, and the default on a CPU."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from worker.kernels.delta import DELTA, GATED_NORM
from worker.kernels.elementwise import EMBEDDING, GATED_ACTIVATION, RMS_NORM, ActivationSpec
from worker.kernels.experts import EXPERTS, ROUTE_EXPERTS
from worker.kernels.gqa import GQA
from worker.kernels.linear import LINEAR
from worker.kernels.mla import INDEX, MLA
from worker.kernels.move import MOVE_ENTRIES
from worker.kernels.operation import Implementation, always
from worker.kernels.prepare import PREPARE_STEP, REMEMBER
from worker.kernels.sampling import CHOOSE, LOGPROBS, MASKED_COPY
from worker.kernels.torch.delta import TorchDelta, gated_norm
from worker.kernels.torch.elementwise import RmsNorm, embedding, gelu_and_mul, silu_and_mul
from worker.kernels.torch.experts import make_experts, supports_experts
from worker.kernels.torch.gqa import TorchGqa, supports_gqa
from worker.kernels.torch.linear import OneDnnLinear, PlainLinear, supports_dense, supports_onednn
from worker.kernels.torch.mla import TorchMla
from worker.kernels.torch.mla_index import TorchIndex
from worker.kernels.torch.move import Move
from worker.kernels.torch.prepare import prepare_step, remember
from worker.kernels.torch.route import TorchRoute
from worker.kernels.torch.sample import choose, masked_copy, token_logprobs


def _gated_activation(spec: ActivationSpec, *_: Any) -> Callable[[Tensor], Tensor]:
    return silu_and_mul if spec.kind == "silu" else gelu_and_mul


COMPILER = None
IMPLEMENTATIONS: list[Implementation[Any, Any]] = [
    Implementation(RMS_NORM, "torch", always, lambda *_: RmsNorm()),
    Implementation(GATED_ACTIVATION, "torch", always, _gated_activation),
    Implementation(EMBEDDING, "torch", always, lambda *_: embedding),
    Implementation(LINEAR, "packed oneDNN", supports_onednn, lambda *_: OneDnnLinear()),
    Implementation(LINEAR, "F.linear", supports_dense, lambda *_: PlainLinear()),
    Implementation(ROUTE_EXPERTS, "torch", always, lambda spec, *_: TorchRoute(spec)),
    Implementation(EXPERTS, "torch", supports_experts, make_experts),
    Implementation(GQA, "torch", supports_gqa, lambda spec, device, dtype: TorchGqa(spec, device, dtype)),
    Implementation(MLA, "torch", always, lambda spec, *_: TorchMla(spec)),
    Implementation(INDEX, "torch", always, lambda spec, *_: TorchIndex(spec)),
    Implementation(DELTA, "torch", always, lambda spec, *_: TorchDelta(spec)),
    Implementation(GATED_NORM, "torch", always, lambda *_: gated_norm),
    Implementation(PREPARE_STEP, "torch", always, lambda *_: prepare_step),
    Implementation(REMEMBER, "torch", always, lambda *_: remember),
    Implementation(MOVE_ENTRIES, "torch", always, lambda *_: Move()),
    Implementation(CHOOSE, "torch", always, lambda *_: choose),
    Implementation(MASKED_COPY, "torch", always, lambda *_: masked_copy),
    Implementation(LOGPROBS, "torch", always, lambda *_: token_logprobs),
]
