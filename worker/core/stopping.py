"""When and why a sequence ends: one pure function over committed and new tokens."""

import enum
from collections.abc import Sequence as Seq

from worker.core.params import StopConditions
from worker.core.stop_sequences import StopSequences
from worker.core.tokens import token_array


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"
    MODEL_LENGTH = "model_length"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    ERROR = "error"


ABORT_REASONS = frozenset({FinishReason.ABORTED, FinishReason.DEADLINE, FinishReason.ERROR})
"""Endings that are not the generation's own: the sequence becomes ABORTED, from any state."""


def find_stop(
    token_ids: Seq[int],
    new_token_ids: Seq[int],
    num_prompt_tokens: int,
    stop: StopConditions,
    max_length: int,
) -> tuple[int, FinishReason | None]:
    """How many of `new_token_ids` are kept, and why the sequence ends there (None: it goes on, all are kept).

    `token_ids` are the committed tokens, prompt first. The earliest position wins; at one position the order is stop
    token sequence, EOS, stop token id, max_tokens, `max_length` of prompt and output. Before `min_tokens` generated
    tokens none of the first three applies. A stop sequence matches generated tokens only. Changes nothing.
    """
    num_generated = len(token_ids) - num_prompt_tokens
    num_tokens = len(token_ids)
    sequences = stop.stop_sequences
    for kept, token in enumerate(new_token_ids, start=1):
        num_generated += 1
        num_tokens += 1
        if num_generated >= stop.min_tokens:
            if token in sequences.last_token_ids:
                newest = new_token_ids[max(kept - sequences.longest, 0) : kept]
                if _completes_sequence(token_ids, newest, num_prompt_tokens, sequences):
                    return kept, FinishReason.STOP_SEQUENCE
            if token in stop.eos_token_ids:
                return kept, FinishReason.EOS
            if token in stop.stop_token_ids:
                return kept, FinishReason.STOP_TOKEN
        if stop.max_tokens is not None and num_generated >= stop.max_tokens:
            return kept, FinishReason.LENGTH
        if num_tokens >= max_length:
            return kept, FinishReason.MODEL_LENGTH
    return len(new_token_ids), None


def _completes_sequence(
    token_ids: Seq[int], new_token_ids: Seq[int], num_prompt_tokens: int, sequences: StopSequences
) -> bool:
    # Of the past only what a sequence may still need, and nothing of the prompt.
    num_past = min(max(sequences.longest - len(new_token_ids), 0), len(token_ids) - num_prompt_tokens)
    tail = token_array(token_ids[len(token_ids) - num_past :])
    tail.extend(new_token_ids)
    return sequences.match_end(tail)
