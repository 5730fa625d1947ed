"""A checkpoint of quantised weights, seen as one of plain ones: each weight is put together of its parts as it is read.

Only the slices of the parts that a slice of the weight needs are read, on whichever device the parts come to.
"""

from collections.abc import Callable, Iterable

from worker.loader.checkpoint import Checkpoint, LazyTensor
from worker.loader.errors import WeightsError
from worker.loader.quantized import grouped, mxfp4, scaled
from worker.loader.quantized.parts import Parts
from worker.loader.quantized.schemes import Awq, Gptq, MxFp4Experts, PackedInt, QuantizedWeights, Scaled, Scheme

CACHE_SCALES = (".k_scale", ".v_scale")
"""Of an attention layer's cache."""
_PARTS: dict[type[Scheme], tuple[str, ...]] = {
    Scaled: scaled.PARTS,
    PackedInt: grouped.PACKED_PARTS,
    Awq: grouped.AWQ_PARTS,
    Gptq: grouped.GPTQ_PARTS,
    MxFp4Experts: (mxfp4.BLOCKS, mxfp4.SCALES),
}
_SIGNS: dict[type[Scheme], tuple[str, ...]] = {
    Scaled: (scaled.SCALE, scaled.INVERSE),
    PackedInt: ("weight_packed", "weight_scale"),
    Awq: grouped.AWQ_PARTS,
    Gptq: grouped.GPTQ_PARTS,
    MxFp4Experts: (mxfp4.BLOCKS, mxfp4.SCALES),
}
"""Parts that no weight has which is not quantised."""


class QuantizedCheckpoint:
    """Implements `Checkpoint`."""

    def __init__(self, stored: Checkpoint, weights: QuantizedWeights) -> None:
        """Raises WeightsError for what is quantised, and should not be."""
        self._stored, self._weights = stored, weights
        self._parts: dict[str, tuple[Scheme, dict[str, str]]] = {}
        """Name of a weight → how it is stored, and its parts' names."""
        self._plain = set(stored.names())
        modules: dict[str, dict[str, str]] = {}
        for name in self._plain:
            module, part = _split(name, weights)
            modules.setdefault(module, {})[part] = name
        for module, parts in modules.items():
            self._take(module, parts)

    def _take(self, module: str, parts: dict[str, str]) -> None:
        scheme = self._weights.scheme_of(module)
        if scheme is None or not parts.keys() & set(_SIGNS[type(scheme)]):
            return
        if self._weights.is_ignored(module):
            field = self._weights.ignored_field
            raise WeightsError(f"{module} is in {field} of config.json, but the checkpoint has it quantised")
        mine = {part: name for part, name in parts.items() if part in _PARTS[type(scheme)]}
        self._plain -= set(mine.values())
        self._parts[module if isinstance(scheme, MxFp4Experts) else f"{module}.weight"] = scheme, mine

    def names(self) -> Iterable[str]:
        """Scales of a cache are among them only where they are read."""
        plain = self._plain
        if not self._weights.has_cache_scales:
            plain = {name for name in plain if not name.endswith(CACHE_SCALES)}
        return [*plain, *self._parts]

    def tensor(self, name: str, packed: bool = False) -> LazyTensor:
        if name not in self._parts:
            return self._stored.tensor(name)
        scheme, names = self._parts[name]
        return _tensor(scheme, Parts(names, self._stored))

    def through(self, wrap: Callable[[Checkpoint], Checkpoint]) -> "QuantizedCheckpoint":
        """The same, with parts that are read through what `wrap` makes of the stored checkpoint."""
        return QuantizedCheckpoint(wrap(self._stored), self._weights)


def _split(name: str, weights: QuantizedWeights) -> tuple[str, str]:
    """(module, part). Experts of MXFP4 are no modules of their own: their parts are told by a last word."""
    module, _, part = name.rpartition(".")
    for rule in weights.rules:
        if isinstance(rule.scheme, MxFp4Experts) and part.endswith((f"_{mxfp4.BLOCKS}", f"_{mxfp4.SCALES}")):
            weight, _, part = name.rpartition("_")
            return weight, part
    return module, part


def _tensor(scheme: Scheme, parts: Parts) -> LazyTensor:
    """Raises ValueError."""
    match scheme:
        case Scaled():
            return scaled.ScaledTensor(parts, scheme)
        case PackedInt():
            return grouped.packed_tensor(parts, scheme)
        case Awq():
            return grouped.awq_tensor(parts, scheme)
        case Gptq():
            return grouped.gptq_tensor(parts, scheme)
        case MxFp4Experts():
            return mxfp4.MxFp4Tensor(parts)
