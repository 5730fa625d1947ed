"""Compiles the kernels of sampling for an NVIDIA GPU that need not be there: python -m tests.kernels.compile_sampling

The interpreter lets pass what the compiler refuses. Every launch is compiled and not run, for vocabularies of one chunk
and of several: Triton compiles a number that is 1 as a constant. Prints a line of JSON: kernel → bytes.
"""

import json
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from tests.kernels.absent import AbsentGpu, compiled_sizes
from tests.kernels.rig import CPU
from worker.kernels.sampling import DrawRules, Draws, Parameters
from worker.kernels.step import SlotTables
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.sample import TritonChoose
from worker.kernels.triton.sample_logprobs import masked_copy, token_logprobs

HOPPER = GPUTarget("cuda", 90, 32)


def compile_all() -> dict[str, int]:
    with patch.object(triton.runtime.driver, "_active", AbsentGpu(HOPPER)), compiled_sizes("cubin") as sizes:
        for vocab_size in (200, 151_936):
            _use_everything(torch.zeros(2, vocab_size, dtype=torch.bfloat16))
    return dict(sizes)


def _use_everything(logits: Tensor) -> None:
    index = torch.tensor([1, 0])
    greedy, drawn = DrawRules(0, None, 0, False, False, False), DrawRules(2, None, 0, False, False, False)
    truncated = DrawRules(2, None, 50, True, True, True)
    choose = TritonChoose(Machine(num_sms=132, shared_memory=232_448, can_overlap=True))
    for rules, rows in ((greedy, None), (drawn, None), (truncated, index)):
        choose(logits, rows, Draws(rules, Parameters.neutral(2, CPU), index, index))
    tables = SlotTables(torch.zeros(3, 99, dtype=torch.int32), torch.ones(3).long(), index, index)
    choose(logits, None, Draws(greedy, Parameters.neutral(2, CPU), index, index), tables)
    for most, rows in ((1, None), (20, index)):
        token_logprobs(logits, rows, index, most)
    masked_copy(logits, None, 2, None)
    masked_copy(logits, index, 2, torch.zeros(2, -(-logits.shape[1] // 32), dtype=torch.int32))


if __name__ == "__main__":
    print(json.dumps(compile_all()))
