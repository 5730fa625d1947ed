"""States between a decoder's layers that somebody else goes on from, in buffers that stay where they are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.layers.setup import LayerSetup


class KeptStates:
    """Of the last pass, graphs' passes included."""

    def __init__(
        self, setup: LayerSetup, places: Sequence[int], num_layers: int, hidden_size: int, max_tokens: int
    ) -> None:
        """`places`: behind how many of the layers. `max_tokens`: of a pass."""
        self.places = tuple(places)
        self.states = torch.zeros(max_tokens, len(places) * hidden_size, dtype=setup.dtype, device=setup.device)
        """[max tokens, places × hidden]: of each token of the pass, the residual stream at all places, side by side;
        complete on every rank."""
        self.has_last = num_layers in places
        """Then the last layer must compute all tokens."""
        self._by_place = self.states.unflatten(1, (len(places), hidden_size)).unbind(1)

    def put(self, place: int, stream: Tensor) -> None:
        """[T, hidden]"""
        for kept_place, states in zip(self.places, self._by_place, strict=True):
            if kept_place == place:
                states[: len(stream)].copy_(stream)
