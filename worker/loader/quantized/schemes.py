"""How the weights of a quantised checkpoint are stored, as its config.json says. No torch."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scaled:
    """A byte a weight, which is multiplied by the scale of its tensor, row or block."""

    is_float: bool
    """float8_e4m3, or a whole number with a sign."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, where scales are of blocks."""


@dataclass(frozen=True, slots=True)
class PackedInt:
    """Whole numbers of `compressed-tensors`, packed along the inputs."""

    bits: int
    group_size: int | None
    """Inputs that share a scale; None: all of them."""
    is_symmetric: bool


@dataclass(frozen=True, slots=True)
class Awq:
    """Whole numbers of 4 bits, packed along the outputs."""

    group_size: int | None


@dataclass(frozen=True, slots=True)
class Gptq:
    """Whole numbers, packed along the inputs, whose groups may be in any order."""

    bits: int
    group_size: int | None
    is_first_version: bool
    """Zero points are stored less one."""


@dataclass(frozen=True, slots=True)
class MxFp4Experts:
    """Experts of one layer in blocks of 32 float4_e2m1 that share a power of two, as GPT-OSS has them."""


Scheme = Scaled | PackedInt | Awq | Gptq | MxFp4Experts

ANY_LINEAR = "Linear"


@dataclass(frozen=True, slots=True)
class Rule:
    targets: tuple[str, ...]
    """Names of modules, `re:` with a regular expression, or `Linear`: all that are quantised."""
    scheme: Scheme

    def applies_to(self, module: str) -> bool:
        return any(target == ANY_LINEAR or names_module(target, module) for target in self.targets)


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    rules: tuple[Rule, ...]
    """The first that applies to a module counts."""
    ignored: tuple[str, ...] = ()
    """Modules that are stored as they are, as in `Rule.targets`."""
    ignored_field: str = ""
    has_cache_scales: bool = False
    """The checkpoint has a scale of the keys, and one of the values, for each layer's cache."""

    @property
    def is_in_blocks(self) -> bool:
        """Whether there are whole numbers in groups, which kernels for `Blocks` may read as they are."""
        return any(isinstance(rule.scheme, PackedInt | Awq | Gptq) for rule in self.rules)

    @property
    def has_fp4_experts(self) -> bool:
        return any(isinstance(rule.scheme, MxFp4Experts) for rule in self.rules)

    def scheme_of(self, module: str) -> Scheme | None:
        """None where no rule applies to it."""
        return next((rule.scheme for rule in self.rules if rule.applies_to(module)), None)

    def is_ignored(self, module: str) -> bool:
        return any(names_module(pattern, module) for pattern in self.ignored)


def names_module(pattern: str, module: str) -> bool:
    """A name stands for what is inside of it, too."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.startswith(f"{pattern}.")
