"""A case's checkpoint, and what `transformers` computes of a text."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

TOLERANCE = 1e-4


@dataclass
class Saved:
    path: Path
    model: PreTrainedModel
    _known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def logits(self, tokens: list[int]) -> Tensor:
        """After each of `tokens`, [tokens, vocabulary]. Worked out once for equal texts."""
        key = tuple(tokens)
        if key not in self._known:
            with torch.inference_mode():
                self._known[key] = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        return self._known[key]

    def assert_greedy(self, prompt: list[int], output: list[int]) -> None:
        """That each token of the output is the one that `transformers` finds most likely after those before it."""
        found = self.logits(prompt + output)[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert output == found

    def assert_logits(self, seen: Tensor, text: list[int], first: int) -> None:
        """`seen` [n, vocabulary]: after the tokens of the text at `first` and the n − 1 places behind it."""
        assert (seen - self.logits(text)[first : first + len(seen)]).abs().max() <= TOLERANCE


def save(make: Callable[[], PreTrainedModel], path: Path) -> Saved:
    """Nothing is left at zero or one where a mistake would not show: norms, biases, sinks."""
    torch.manual_seed(0)
    model = make().float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and any(part in name for part in ("norm", "bias", "sinks", "scalar")):
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(path)
    return Saved(path, model)
