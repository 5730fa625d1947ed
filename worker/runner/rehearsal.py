"""All that steps can ask of the kernels, asked once before the first of them: so that they are compiled together, at
start-up, and no request waits for that."""

import logging
import time
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from worker.attention.context import ForwardContext, forward_context
from worker.attention.interface import CacheBuilder, CacheLayer
from worker.kernels.operation import KernelCompiler
from worker.kernels.prepare import REMEMBER
from worker.models.base import CausalLM
from worker.runner.greedy import GreedyChoices, choices_alone, choices_of_ranks
from worker.runner.model_runner import RunnerParts
from worker.sampling.sampler import Sampler

logger = logging.getLogger(__name__)

MAX_TOKENS = 4096
"""Of rehearsed passes: what a kernel compiles in of the number of tokens, it does below."""


def compile_kernels(compiler: KernelCompiler, parts: RunnerParts, max_context_len: int, max_logits: int) -> None:
    """`max_logits`: most tokens that are sampled in one step."""
    start = time.perf_counter()
    with compiler.threads(), compiler.rehearsal():
        rehearse(parts, max_context_len, max_logits)
    logger.info(
        "kernels: %d made ready on %d threads in %.1f s",
        compiler.num_kernels, compiler.num_threads, time.perf_counter() - start,
    )  # fmt: skip


@torch.inference_mode()
def rehearse(parts: RunnerParts, max_context_len: int, max_logits: int) -> None:
    """Caches must be bound; their content, and the buffers', may be anything. All ranks must do this alike."""
    parts.preparer.prepare_padding()
    nothing = parts.preparer.buffers.positions[:1]
    parts.kernels.choose(REMEMBER, None, torch.int64)(parts.slots.tables, nothing, nothing, nothing)
    of_ranks = choices_of_ranks(parts.kernels, parts.tp, parts.model, parts.slots, parts.preparer.buffers)
    _rehearse_model(parts, parts.model, parts.builders, max_context_len, max_logits, of_ranks)
    if parts.drafting is not None:
        draft = parts.drafting.draft
        _rehearse_model(parts, draft.model, draft.builders, max_context_len, max_logits, None)


def _rehearse_model(
    parts: RunnerParts, model: CausalLM, builders: Sequence[CacheBuilder], max_context_len: int, max_logits: int,
    of_ranks: GreedyChoices | None,
) -> None:  # fmt: skip
    buffers = parts.preparer.buffers
    greedy = of_ranks or choices_alone(parts.kernels, parts.tp, model, parts.slots, buffers)
    layers: dict[Hashable, tuple[CacheLayer, Tensor]] = {}
    """One for each builder, and its input in the largest pass."""

    def cut(layer: CacheLayer, x: Tensor) -> Tensor:
        layers[layer.spec] = layer, x
        return x.new_empty(len(x), layer.output_size)

    max_rows, max_tokens = len(buffers.context_lens), len(buffers.input_ids)
    logits = None
    for num_tokens in _sizes(min(max_tokens, MAX_TOKENS)):
        with forward_context(ForwardContext((), cut, positions=buffers.positions[:num_tokens])):
            hidden = model(buffers.input_ids[:num_tokens])
        logits = model.logits(hidden[:max_logits])
        if greedy.of_hidden is not None and num_tokens <= min(max_rows, greedy.most_rows_of_hidden):
            greedy.of_hidden(hidden, parts.preparer.uniform_rows(num_tokens))
    if logits is not None:
        if greedy.of_logits is not None:
            greedy.of_logits(logits, parts.preparer.uniform_rows(1))
        Sampler(parts.kernels).rehearse(logits, parts.slots.parameters)
    # Builders are in the order in which their kinds of layers come.
    for number, (builder, (layer, x)) in enumerate(zip(builders, layers.values(), strict=True)):
        for step in builder.all_steps(max_rows, max_tokens, max_context_len):
            metadata = (*[None] * number, builder.prepare(step, buffers))
            with forward_context(ForwardContext(metadata)):
                layer.attend(x.new_empty(step.num_tokens, *x.shape[1:]))


def _sizes(largest: int) -> Iterator[int]:
    """Powers of two below, and the largest."""
    size = 1
    while size < largest:
        yield size
        size *= 2
    yield largest
