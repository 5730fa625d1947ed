"""Operations of a CPU in C++, compiled on the machine that runs them."""

from typing import Any

from worker.kernels.decoder import DECODER
from worker.kernels.experts import EXPERTS
from worker.kernels.gqa import GQA
from worker.kernels.linear import LINEAR, TABLE
from worker.kernels.native.choose import NativeChoose, supports_choose
from worker.kernels.native.decoder import NativeDecoder, supports_decoder
from worker.kernels.native.experts import NativeExperts, supports_experts
from worker.kernels.native.gqa import NativeGqa, supports_gqa
from worker.kernels.native.linear import NativeLinear, supports_linear
from worker.kernels.native.slots import NativePrepare, NativeRemember, supports_slots
from worker.kernels.operation import Implementation
from worker.kernels.prepare import PREPARE_STEP, REMEMBER
from worker.kernels.sampling import CHOOSE

COMPILER = None
IMPLEMENTATIONS: list[Implementation[Any, Any]] = [
    Implementation(DECODER, "native", supports_decoder, lambda spec, *_: NativeDecoder(spec)),
    Implementation(LINEAR, "native", supports_linear, lambda spec, *_: NativeLinear(spec)),
    Implementation(TABLE, "native", supports_linear, lambda spec, *_: NativeLinear(spec)),
    Implementation(EXPERTS, "native", supports_experts, lambda spec, *_: NativeExperts(spec)),
    Implementation(CHOOSE, "native", supports_choose, lambda *_: NativeChoose()),
    Implementation(PREPARE_STEP, "native", supports_slots, lambda *_: NativePrepare()),
    Implementation(REMEMBER, "native", supports_slots, lambda *_: NativeRemember()),
    Implementation(GQA, "native", supports_gqa, lambda spec, *_: NativeGqa(spec)),
]
