"""The compiled library as Python sees it: its structs and functions, and the threads that it runs on."""

import ctypes
import logging
from collections.abc import Callable
from ctypes import POINTER, Structure, c_bool, c_float, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from worker.kernels.native.build import BuildError, best_level, library, this_cpu

logger = logging.getLogger(__name__)


class Matrix(Structure):
    """See matrix.h."""

    _fields_ = (
        ("data", c_void_p), ("bias", c_void_p), ("in_features", c_int32), ("out_features", c_int32),
        ("bits", c_int32), ("block", c_int32), ("middle", c_int32),
    )  # fmt: skip


class Stored(Structure):
    """See pack.h."""

    _fields_ = (
        ("numbers", c_void_p), ("scales", c_void_p), ("minima", c_void_p),
        ("number_row", c_int64), ("number_step", c_int64), ("scale_row", c_int64), ("scale_step", c_int64),
        ("minimum_row", c_int64), ("minimum_step", c_int64), ("block", c_int32), ("form", c_int32),
    )  # fmt: skip


class Layer(Structure):
    """See decoder.h; so for the others."""

    _fields_ = (
        ("qkv", Matrix), ("output", Matrix), ("gate_up", Matrix), ("down", Matrix),
        ("attention_norm", c_void_p), ("mlp_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("cos", c_void_p), ("sin", c_void_p),
        ("k", c_void_p), ("v", c_void_p), ("k_scale", c_float), ("v_scale", c_float),
    )  # fmt: skip


class Model(Structure):
    _fields_ = (
        ("num_layers", c_int32), ("hidden_size", c_int32), ("intermediate_size", c_int32), ("heads", c_int32),
        ("kv_heads", c_int32), ("head_dim", c_int32), ("block_size", c_int32), ("kept", c_int32),
        ("block_stride", c_int64), ("scale", c_float), ("eps", c_float), ("head_eps", c_float), ("norm", c_void_p),
        ("layers", POINTER(Layer)),
    )  # fmt: skip


class StepView(Structure):
    _fields_ = (
        ("num_tokens", c_int32), ("num_rows", c_int32), ("table_stride", c_int32),
        ("positions", c_void_p), ("slots", c_void_p),
        ("query_starts", c_void_p), ("context_lens", c_void_p), ("block_tables", c_void_p),
    )  # fmt: skip


class Experts(Structure):
    """See experts.h; the last three are a gate (outputs.h)."""

    _fields_ = (
        ("gate_up", Matrix), ("down", Matrix),
        ("num_experts", c_int32), ("first_expert", c_int32), ("top_k", c_int32),
        ("curve", c_int32), ("alpha", c_float), ("limit", c_float),
    )  # fmt: skip


class Slots(Structure):
    """See slots.h; so for the next two."""

    _fields_ = (
        ("tokens", c_void_p), ("lengths", c_void_p), ("block_tables", c_void_p), ("groups", c_void_p),
        ("most_tokens", c_int64), ("most_blocks", c_int64), ("spare_slot", c_int64),
    )  # fmt: skip


class Staged(Structure):
    _fields_ = (
        ("slots", c_void_p), ("starts", c_void_p), ("lens", c_void_p), ("num_rows", c_int32),
        ("num_uniform_rows", c_int32), ("num_padding_rows", c_int32), ("block_size", c_int32), ("table_width", c_int32),
    )  # fmt: skip


class Buffers(Structure):
    _fields_ = (
        ("input_ids", c_void_p), ("positions", c_void_p), ("token_slots", c_void_p), ("query_starts", c_void_p),
        ("context_lens", c_void_p), ("next_positions", c_void_p), ("block_tables", c_void_p), ("groups", c_void_p),
        ("most_blocks", c_int64),
    )  # fmt: skip


class Choose(Structure):
    """See choose.h."""

    _fields_ = (
        ("logits", c_void_p), ("stride", c_int64), ("rows", c_void_p), ("num_rows", c_int32), ("vocabulary", c_int32),
        ("integers", c_void_p), ("floats", c_void_p), ("slots", c_void_p), ("positions", c_void_p),
        ("bests", c_void_p), ("ids", c_void_p),
    )  # fmt: skip


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "fissile_vector_width": (ctypes.c_int, ()),
    "fissile_create": (c_void_p, (ctypes.c_int,)),
    "fissile_destroy": (None, (c_void_p,)),
    "fissile_packed_bytes": (c_size_t, (POINTER(Matrix),)),
    "fissile_pack_floats": (None, (c_void_p, POINTER(Matrix), c_void_p, c_void_p)),
    "fissile_pack_blocks": (None, (c_void_p, POINTER(Matrix), POINTER(Stored), c_void_p)),
    "fissile_rows": (c_bool, (POINTER(Matrix), c_void_p, ctypes.c_int, c_void_p)),
    "fissile_product": (None, (c_void_p, POINTER(Matrix), c_void_p, ctypes.c_int, c_void_p)),
    "fissile_best": (None, (c_void_p, POINTER(Matrix), c_void_p, ctypes.c_int, c_void_p)),
    "fissile_write_qkv": (None, (c_void_p, POINTER(Model), POINTER(Layer), POINTER(StepView), c_void_p)),
    "fissile_attend": (
        None, (c_void_p, POINTER(Model), POINTER(Layer), POINTER(StepView), c_void_p, c_int64, c_void_p),
    ),
    "fissile_experts": (
        None, (c_void_p, POINTER(Experts), c_void_p, c_void_p, c_void_p, ctypes.c_int, c_void_p),
    ),
    "fissile_choose": (None, (c_void_p, POINTER(Choose))),
    "fissile_prepare": (None, (POINTER(Staged), POINTER(Slots), POINTER(Buffers))),
    "fissile_remember": (None, (POINTER(Slots), c_void_p, c_void_p, c_void_p, ctypes.c_int)),
    "fissile_decode": (
        None, (c_void_p, POINTER(Model), POINTER(StepView), c_void_p, ctypes.c_int, c_void_p, c_void_p),
    ),
}  # fmt: skip


class Recorder(Protocol):
    def record(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """A call, in place of making it."""


class Function:
    """One of the library. Takes structs as they are where it expects pointers to them."""

    __slots__ = ("_compiled",)
    recorder: "ClassVar[Recorder | None]" = None
    """Of the calls of all of them."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __call__(self, *arguments: Any) -> Any:
        """None while they are recorded."""
        recorder = self.recorder
        return self._compiled(*arguments) if recorder is None else recorder.record(self._compiled, arguments)


class Engine:
    """The library with threads of its own. Calls let other Python threads run, and take turns."""

    def __init__(self, functions: SimpleNamespace, num_threads: int) -> None:
        self.functions = functions
        self.num_threads = num_threads
        self._handle: int = functions.fissile_create(num_threads)

    def __del__(self) -> None:
        self.functions.fissile_destroy(self._handle)

    def packed_bytes(self, matrix: Matrix) -> int:
        return int(self.functions.fissile_packed_bytes(matrix))

    def pack_floats(self, matrix: Matrix, weight: Tensor) -> None:
        """To where the matrix points."""
        self.functions.fissile_pack_floats(self._handle, matrix, pointer(weight), matrix.data)

    def pack_blocks(self, matrix: Matrix, stored: Stored) -> None:
        """The same of blocks, which become floats where the matrix has 32 bits."""
        self.functions.fissile_pack_blocks(self._handle, matrix, stored, matrix.data)

    def product(self, matrix: Matrix, x: Tensor, out: Tensor) -> None:
        """float32 [T, in] → out [T, out]."""
        self.functions.fissile_product(self._handle, matrix, x.data_ptr(), x.shape[0], out.data_ptr())

    def best(self, matrix: Matrix, x: Tensor, ids: Tensor) -> None:
        """As a `Finder`, float32 x → ids, int64 [T]."""
        self.functions.fissile_best(self._handle, matrix, x.data_ptr(), x.shape[0], ids.data_ptr())

    def rows(self, matrix: Matrix, ids: Tensor, out: Tensor) -> None:
        """Raises IndexError."""
        if self.functions.fissile_rows(matrix, ids.data_ptr(), ids.shape[0], out.data_ptr()) is False:
            raise IndexError(f"index out of range: the table has {matrix.out_features} rows")

    def write_qkv(self, model: Model, layer: Layer, step: StepView, qkv: Tensor) -> None:
        """As `GqaKernel.write_qkv`, in float32, and in place: q, k and v lie in `qkv`."""
        self.functions.fissile_write_qkv(self._handle, model, layer, step, qkv.data_ptr())

    def attend(self, model: Model, layer: Layer, step: StepView, q: Tensor, out: Tensor) -> None:
        """As `GqaKernel.attend`, in float32; rows of q may lie apart."""
        self.functions.fissile_attend(self._handle, model, layer, step, q.data_ptr(), q.stride(0), out.data_ptr())

    def experts(self, experts: Experts, x: Tensor, weights: Tensor, ids: Tensor, out: Tensor) -> None:
        """As `ExpertsKernel`, float32 x and ids in 64 bits."""
        self.functions.fissile_experts(
            self._handle, experts, pointer(x), pointer(weights), pointer(ids), len(x), pointer(out)
        )

    def choose(self, choose: Choose) -> None:
        self.functions.fissile_choose(self._handle, choose)

    def decode(self, model: Model, step: StepView, wanted: Tensor | None, x: Tensor, out: Tensor) -> None:
        """As `DecoderKernel`, float32 x [T, hidden] → out."""
        self.functions.fissile_decode(
            self._handle, model, step, pointer(wanted), out.shape[0], x.data_ptr(), out.data_ptr()
        )


@cache
def obstacle() -> str | None:
    """Why there is no library here; None where there is one. Compiles it if need be."""
    try:
        _functions()
    except BuildError as error:
        return str(error)
    return None


@cache
def engine() -> Engine:
    """This process's, with as many threads as torch has when it is first asked for. Raises BuildError."""
    return Engine(_functions(), torch.get_num_threads())


def functions() -> SimpleNamespace:
    """Those that need no threads. Raises BuildError."""
    return _functions()


@cache
def _functions() -> SimpleNamespace:
    level = best_level(this_cpu())
    path = library(level)
    try:
        compiled = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
    functions = {}
    for name, (result, arguments) in _FUNCTIONS.items():
        function = compiled[name]
        function.restype, function.argtypes = result, arguments
        functions[name] = Function(function)
    logger.info("native kernels for %s", level.name)
    return SimpleNamespace(**functions)


def pointer(tensor: Tensor | None) -> int | None:
    """To be kept no longer than the tensor, which must be contiguous."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
