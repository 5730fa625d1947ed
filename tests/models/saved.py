"""A case's checkpoint, and what `transformers` computes of a text."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

TOLERANCE = 1e-4


class AllFloat64(TorchDispatchMode):
    """What asks for float32 gets float64."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return function(*map(widened, args), **{key: widened(value) for key, value in (kwargs or {}).items()})


@dataclass
class Saved:
    path: Path
    model: PreTrainedModel
    """In float32; in float64, where a case's model is: then nothing of it is computed in less."""
    options: dict[str, object] = field(default_factory=dict)
    """What a runner of it is built with."""
    _known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @property
    def precision(self) -> AbstractContextManager[object]:
        """What the model is to run in."""
        return AllFloat64() if self.model.dtype is torch.float64 else nullcontext()

    def logits(self, tokens: list[int]) -> Tensor:
        """After each of `tokens`, [tokens, vocabulary]. Worked out once for equal texts."""
        key = tuple(tokens)
        if key not in self._known:
            with torch.inference_mode(), self.precision:
                self._known[key] = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        return self._known[key]

    def assert_greedy(self, prompt: list[int], output: list[int]) -> None:
        """That each token of the output is the one that `transformers` finds most likely after those before it."""
        found = self.logits(prompt + output)[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert output == found

    def assert_logits(self, seen: Tensor, text: list[int], first: int) -> None:
        """`seen` [n, vocabulary]: after the tokens of the text at `first` and the n − 1 places behind it."""
        assert (seen - self.logits(text)[first : first + len(seen)]).abs().max() <= TOLERANCE


def save(make: Callable[[], PreTrainedModel], path: Path, options: dict[str, object] | None = None) -> Saved:
    """In float32. Nothing is left at zero or one where a mistake would not show: norms, biases, sinks, scales."""
    torch.manual_seed(0)
    model = make().eval()
    dtype = model.dtype
    model.float()
    stored = model.state_dict().keys()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name not in stored:
                continue  # such as Gemma's `embed_scale`, which its config tells
            if tensor.is_floating_point() and any(part in name for part in ("norm", "bias", "sinks", "scal")):
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(path)
    return Saved(path, model.to(dtype), options or {})
