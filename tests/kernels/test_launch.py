"""Launches that are alike: Triton is asked once a step for each variant."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")


class Compiled:
    def __init__(self, launched: list[tuple[object, ...]]) -> None:
        self._launched = launched

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: self._launched.append((grid, *args))


class Kernel:
    """As Triton's: each launch says which variant it took; None where kernels are interpreted."""

    def __init__(self, *, compiles: bool = True) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.launched: list[tuple[object, ...]] = []
        self._compiles = compiles

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled | None]:
        def launch(*args: object, **options: object) -> Compiled | None:
            self.asked.append((grid, *args, *options.values()))
            return Compiled(self.launched) if self._compiles else None

        return launch


def test_only_what_may_be_another_variant_is_asked_for() -> None:
    from worker.kernels.triton.launch import Launches

    kernel, launches = Kernel(), Launches()
    memory = torch.zeros(64)
    here, there, aside, half = memory[:8], memory[32:40], memory[1:9], memory.half()
    launches(kernel, (3,), here, 5, None, num_warps=4)
    launches(kernel, (7, 2), there, 5, None, num_warps=4)
    assert kernel.asked == [((3,), here, 5, None, 4)]
    assert kernel.launched == [((7, 2, 1), there, 5, None)]
    for args, options in (
        ((aside, 5, None), {"num_warps": 4}), ((half, 5, None), {"num_warps": 4}), ((here, 6, None), {"num_warps": 4}),
        ((here, 5, here), {"num_warps": 4}), ((here, 5, None), {"num_warps": 8}),
    ):  # fmt: skip
        launches(kernel, (3,), *args, **options)
    other = Kernel()
    launches(other, (3,), here, 5, None, num_warps=4)
    assert len(kernel.asked) == 6 and len(kernel.launched) == 1 and len(other.asked) == 1


def test_what_is_not_compiled_is_asked_for_each_time() -> None:
    from worker.kernels.triton.launch import Launches

    kernel, launches = Kernel(compiles=False), Launches()
    for _ in range(2):
        launches(kernel, (1,), torch.zeros(4))
    assert len(kernel.asked) == 2
