"""Sampling parameters of new sequences, packed for `worker.kernels.sampling.Parameters`."""

from collections.abc import Iterable

from worker.core.batch import NewSequence

PackedIntegers = list[tuple[int, int, int]]
PackedFloats = list[tuple[float, float, float, float, float, float]]


def pack(news: Iterable[NewSequence]) -> tuple[PackedIntegers, PackedFloats]:
    """The columns of `Parameters`, in their order. A seed has 64 bits without a sign."""
    integers, floats = [], []
    for new in news:
        p = new.sampling
        integers.append((p.top_k, p.seed, new.num_prompt_tokens))
        floats.append((p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty))
    return integers, floats
