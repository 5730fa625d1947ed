"""Requests that could never run, refused at once with the numbers."""

from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.errors import InvalidSequenceError
from worker.core.sequence import Sequence


def max_length_of(seq: Sequence, config: SchedulerConfig, cache: CacheConfig) -> int:
    """Committed tokens at which the sequence ends at the latest.

    A pool too small for the whole context shortens only what has no `max_tokens` of its own; a limit that was asked for
    and does not fit is refused.
    """
    if seq.stop.max_tokens is None:
        return min(config.max_model_len, _num_fitting(seq, cache))
    return min(seq.num_prompt_tokens + seq.stop.max_tokens, config.max_model_len)


def _num_fitting(seq: Sequence, cache: CacheConfig) -> int:
    """Tokens that the whole pool can hold of each of its beams. The last one's KV is never computed."""
    return cache.num_blocks // _num_beams(seq) * cache.block_size + 1


def _num_beams(seq: Sequence) -> int:
    return max(seq.beam.width, 1) if seq.beam is not None else 1


def check_sequence(seq: Sequence, config: SchedulerConfig, cache: CacheConfig) -> None:
    """Raises `InvalidSequenceError` if `seq` could not run even alone. Changes nothing."""
    _check_tokens(seq, config)
    # Of a resumed sequence only the prompt counts: what outgrew one step since comes in over several.
    num_tokens = seq.num_prompt_tokens
    if not config.can_chunk and num_tokens > config.max_num_batched_tokens:
        raise InvalidSequenceError(
            "token_ids",
            num_tokens,
            config.max_num_batched_tokens,
            f"a prompt of {num_tokens} tokens does not fit into one step of {config.max_num_batched_tokens} tokens, "
            "and prompts are not split into chunks here",
        )
    _check_blocks(seq, config, cache)
    if seq.beam is not None:
        _check_beam(seq, config)


def _check_tokens(seq: Sequence, config: SchedulerConfig) -> None:
    if seq.num_prompt_tokens < 1 or seq.num_tokens < seq.num_prompt_tokens:
        raise InvalidSequenceError("token_ids", seq.num_tokens, 1, "the prompt is empty; at least 1 token is needed")
    if seq.stop.max_tokens is not None and seq.stop.max_tokens < 1:
        raise InvalidSequenceError("max_tokens", seq.stop.max_tokens, 1, "max_tokens must be at least 1")
    if seq.num_prompt_tokens >= config.max_model_len:
        raise InvalidSequenceError(
            "token_ids",
            seq.num_prompt_tokens,
            config.max_model_len - 1,
            f"the prompt has {seq.num_prompt_tokens} tokens; with room for one more the model takes "
            f"at most {config.max_model_len - 1}",
        )


def _check_blocks(seq: Sequence, config: SchedulerConfig, cache: CacheConfig) -> None:
    num_fitting, max_tokens = _num_fitting(seq, cache), seq.stop.max_tokens
    # Without a limit of its own a single token is enough.
    num_cached = seq.num_prompt_tokens if max_tokens is None else max_length_of(seq, config, cache) - 1
    num_needed = -(-num_cached // cache.block_size) * _num_beams(seq)
    if num_needed <= cache.num_blocks:
        return
    needs = (
        f"needs {num_needed} cache blocks of {cache.block_size} tokens; there are {cache.num_blocks}, enough for "
        f"{num_fitting} tokens"
    )
    if max_tokens is None:
        message = f"a prompt of {seq.num_prompt_tokens} tokens {needs}, the first generated one among them"
        raise InvalidSequenceError("token_ids", seq.num_prompt_tokens, num_fitting - 1, message)
    message = f"a prompt of {seq.num_prompt_tokens} tokens with max_tokens {max_tokens} {needs}"
    raise InvalidSequenceError("max_tokens", max_tokens, max(num_fitting - seq.num_prompt_tokens, 0), message)


def _check_beam(seq: Sequence, config: SchedulerConfig) -> None:
    assert seq.beam is not None
    width = seq.beam.width
    if not 1 <= width <= config.max_num_seqs:
        raise InvalidSequenceError(
            "beam.width", width, config.max_num_seqs, f"beam width {width}; 1 to {config.max_num_seqs} is possible"
        )
    if seq.num_resumed_tokens:
        raise InvalidSequenceError(
            "token_ids", seq.num_tokens, seq.num_prompt_tokens, "a beam search starts from its prompt alone"
        )


def check_group(sequences: list[Sequence], config: SchedulerConfig) -> None:
    """Raises `InvalidSequenceError` unless the members of a group could run beside each other."""
    if len(sequences) > config.max_num_seqs:
        raise InvalidSequenceError(
            "n",
            len(sequences),
            config.max_num_seqs,
            f"n is {len(sequences)}; at most {config.max_num_seqs} run at once",
        )
    parent = sequences[0]
    for seq in sequences:
        if seq.beam is not None:
            raise InvalidSequenceError("n", len(sequences), 1, "a beam search is no member of a group")
        if seq is not parent and seq.parent_id != parent.id:
            raise InvalidSequenceError("parent_id", seq.id, parent.id, f"member {seq.id} does not name {parent.id}")
    if len({seq.id for seq in sequences}) < len(sequences):
        raise InvalidSequenceError("id", parent.id, 0, "members of one request have ids of their own")
