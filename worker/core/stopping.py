"""When a sequence ends: one pure function over committed and new tokens."""

from collections.abc import Sequence as Seq

from worker.core.params import StopConditions
from worker.core.sequence import FinishReason


def find_stop(
    token_ids: Seq[int],
    new_token_ids: Seq[int],
    num_prompt_tokens: int,
    stop: StopConditions,
    max_model_len: int,
) -> tuple[int, FinishReason | None]:
    """How many of `new_token_ids` are kept, and why the sequence ends there (None: it goes on, all are kept).

    `token_ids` are the committed tokens, prompt first. The earliest position wins; at one position the order is stop
    token sequence, EOS, stop token id, max_tokens, max_model_len. Before `min_tokens` generated tokens none of the
    first three applies. A stop sequence matches generated tokens only. Changes nothing.
    """
    longest = max(map(len, stop.stop_token_sequences), default=0)
    # Of the past only what a stop sequence may still need, and nothing of the prompt.
    generated = list(token_ids[max(num_prompt_tokens, len(token_ids) - longest) :])
    num_generated = len(token_ids) - num_prompt_tokens
    num_tokens = len(token_ids)
    for kept, token in enumerate(new_token_ids, start=1):
        num_generated += 1
        num_tokens += 1
        generated.append(token)
        if num_generated >= stop.min_tokens:
            if _ends_with_any(generated, stop.stop_token_sequences):
                return kept, FinishReason.STOP_SEQUENCE
            if token in stop.eos_token_ids:
                return kept, FinishReason.EOS
            if token in stop.stop_token_ids:
                return kept, FinishReason.STOP_TOKEN
        if num_generated >= stop.max_tokens:
            return kept, FinishReason.LENGTH
        if num_tokens >= max_model_len:
            return kept, FinishReason.MODEL_LENGTH
    return len(new_token_ids), None


def _ends_with_any(generated: list[int], stop_token_sequences: tuple[tuple[int, ...], ...]) -> bool:
    for wanted in stop_token_sequences:
        if len(wanted) <= len(generated) and tuple(generated[-len(wanted) :]) == wanted:
            return True
    return False
