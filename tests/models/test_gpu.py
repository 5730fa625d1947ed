"""Each family on a GPU in float32: greedy tokens equal those of `transformers`, through graphs and without."""

import pytest
import torch

from tests.models.saved import Saved
from tests.models.test_cases import prompt
from tests.runner.conftest import make_driver

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_equal_transformers(saved: Saved, enforce_eager: bool) -> None:
    """Prompts in chunks beside rows that decode, then decode alone."""
    options = {"device": "cuda", "dtype": "float32", "enforce_eager": enforce_eager}
    driver = make_driver(saved.path, **saved.options | options)
    parts = driver.runner._parts
    carried_out = parts.kernels.describe()
    assert {carried_out[name] for name in ("gqa", "mla", "gated_delta") if name in carried_out} == {"triton"}
    assert parts.forward.has_full_graphs == (not enforce_eager and "mla_index" not in carried_out)
    a, b, c = (driver.add(prompt(n)) for n in (5, 30, 90))
    driver.prefill(a, b)
    driver.run([(a, 1), (c, 70)])
    driver.run([(b, 1), (c, 20), (a, 1)])
    driver.decode(a, b, c, steps=16)
    driver.decode(c, a, steps=4)
    for seq in (a, b, c):
        saved.assert_greedy(seq.tokens[: seq.num_prompt], seq.output)
