"""What a model's weights take, as the start's report has it."""

from typing import Any

import pytest
import torch

from worker.kernels.linear import LINEAR, TABLE, LinearKernel
from worker.kernels.select import Kernels
from worker.kernels.torch.linear import OneDnnLinear, PlainLinear
from worker.kernels.weights import Dense
from worker.layers.embedding import OutputHead, TokenEmbedding
from worker.layers.setup import LayerSetup
from worker.parallel.group import ALONE

VOCABULARY, HIDDEN = 60, 32
TABLE_BYTES = VOCABULARY * HIDDEN * 4


class WithLinear(Kernels):
    """Torch's, with this product, and without packed tables, as on a GPU."""

    def __init__(self, linear: LinearKernel) -> None:
        super().__init__(torch.device("cpu"), "torch")
        self._linear = linear

    def find(self, operation: Any, spec: Any, dtype: torch.dtype) -> Any:
        if operation is TABLE:
            return None
        return self._linear if operation is LINEAR else super().find(operation, spec, dtype)


@pytest.mark.parametrize("kernel", [PlainLinear, OneDnnLinear])
def test_a_tied_table_is_counted_as_often_as_it_is_there(kernel: type[PlainLinear | OneDnnLinear]) -> None:
    setup = LayerSetup(WithLinear(kernel()), ALONE, torch.float32)
    embedding = TokenEmbedding(setup, VOCABULARY, HIDDEN)
    embedding.weight.tensors()[0].normal_()
    head = OutputHead(setup, VOCABULARY, HIDDEN, tied_to=embedding)
    assert embedding.pack() == TABLE_BYTES
    is_shared = kernel is PlainLinear
    assert head.pack() == (0 if is_shared else TABLE_BYTES)
    assert head(embedding(torch.arange(3))).shape == (3, VOCABULARY)


def test_a_head_of_its_own_is_counted() -> None:
    head = OutputHead(LayerSetup(WithLinear(PlainLinear()), ALONE, torch.float32), VOCABULARY, HIDDEN)
    assert head.pack() == TABLE_BYTES


def test_a_kernel_tells_whether_it_copies() -> None:
    weight = torch.randn(VOCABULARY, HIDDEN)
    assert PlainLinear().pack(Dense(weight)).weight.data_ptr() == weight.data_ptr()
    assert not PlainLinear.copies and OneDnnLinear.copies
