"""What routers send → core, in this one place. A worker does not trust routers: everything is checked here.

Fields are named as in SequenceGroup. The prompt, the sampling and the stops of a group are checked and converted once,
however many sequences it has.
"""

import math
import secrets
import time
from collections.abc import Sequence as List
from dataclasses import dataclass, replace

from common import bounds
from fissile import v1
from worker.core.params import BeamParams, SamplingParams, StopConditions
from worker.core.sequence import Sequence
from worker.core.tokens import token_array
from worker.face.convert_sampling import check_together, sampling_from_pb
from worker.face.requirements import check_token_ids, require, require_at_most, require_in, require_length
from worker.runner.config import ModelInfo


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a sequence is checked against."""

    vocab_size: int
    max_model_len: int
    """Most tokens of a sequence, prompt and output."""
    block_size: int
    num_blocks: int
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, model: ModelInfo) -> "ModelLimits":
        return cls(
            model.config.vocab_size,
            model.max_model_len,
            model.block_size,
            model.num_blocks,
            frozenset(model.config.eos_token_ids),
        )

    def max_tokens_left(self, num_prompt_tokens: int, beam_width: int) -> int:
        """Most tokens that fit behind a prompt, in the context and in the KV cache. The last one needs no KV."""
        num_cacheable = self.num_blocks // beam_width * self.block_size + 1
        return min(self.max_model_len, num_cacheable) - num_prompt_tokens


def group_from_pb(message: v1.SequenceGroup, engine_ids: List[int], limits: ModelLimits) -> list[Sequence]:
    """Core sequences that arrive now, with `engine_ids`; the first is the parent of the others. Raises
    InvalidArgumentError naming the field."""
    prompt_token_ids = list(message.prompt_token_ids)  # protobuf's own list takes several times as long to go through
    require(len(prompt_token_ids) > 0, "prompt_token_ids", "[]", "at least 1 token")
    check_token_ids("prompt_token_ids", prompt_token_ids, limits.vocab_size)
    prompt = token_array(prompt_token_ids)
    beam = _beam_from_pb(message.sampling.beam_search) if message.sampling.HasField("beam_search") else None
    sampling = sampling_from_pb(message.sampling, limits.vocab_size)
    check_together(message)
    require_at_most(bounds.MAX_SALT_BYTES, "cache_salt", len(message.cache_salt), "bytes long")
    stop = _stop_from_pb(message, beam.width if beam else 1, limits)
    _check_members(message, stop, limits)
    require(beam is None or len(engine_ids) == 1, "sequences", f"{len(engine_ids)} long", "1 with beam_search")
    now = time.monotonic()
    return [
        Sequence(
            id=engine_id,
            token_ids=prompt + token_array(member.token_ids) if member.token_ids else prompt,
            num_prompt_tokens=len(prompt),
            stop=stop,
            sampling=_sampling_of(member, sampling, is_first=engine_id == engine_ids[0]),
            priority=message.priority,
            deadline=now + message.deadline_ms / 1000 if message.HasField("deadline_ms") else None,
            cache_salt=message.cache_salt,
            arrival_time=now,
            parent_id=None if engine_id == engine_ids[0] else engine_ids[0],
            index=member.index,
            beam=beam,
        )
        for member, engine_id in zip(message.sequences, engine_ids, strict=True)
    ]


def _check_members(message: v1.SequenceGroup, stop: StopConditions, limits: ModelLimits) -> None:
    members = message.sequences
    require_length(1, int(bounds.N.high), "sequences", members)
    num_tokens = len(members) * len(message.prompt_token_ids)
    require_at_most(bounds.MAX_FANOUT_TOKENS, "sequences", num_tokens, "prompt tokens together")
    for name in ("id", "index"):
        values = [getattr(member, name) for member in members]
        require(len(set(values)) == len(values), "sequences", f"one with an {name} twice", f"each {name} once")
    for i, member in enumerate(members):
        require(member.id > 0, f"sequences[{i}].id", member.id, "1 or more")
        check_token_ids(f"sequences[{i}].token_ids", member.token_ids, limits.vocab_size)
        num_generated = len(member.token_ids)
        wanted = f"at least {num_generated + 1}" + (f": {num_generated} are generated already" if num_generated else "")
        require(stop.max_tokens is None or stop.max_tokens > num_generated, "max_tokens", stop.max_tokens, wanted)


def _sampling_of(member: v1.Sequence, sampling: SamplingParams, *, is_first: bool) -> SamplingParams:
    """Those of the group, with the member's own seed. The prompt's log probabilities are reported once."""
    seed = member.seed if member.HasField("seed") else secrets.randbits(64)
    return replace(sampling, seed=seed, num_prompt_logprobs=sampling.num_prompt_logprobs if is_first else None)


def _beam_from_pb(message: v1.BeamSearch) -> BeamParams:
    field = "sampling.beam_search"
    require_in(bounds.BEAM_WIDTH, f"{field}.width", message.width)
    length_penalty = message.length_penalty if message.HasField("length_penalty") else 1.0
    require(math.isfinite(length_penalty), f"{field}.length_penalty", length_penalty, "a finite number")
    return BeamParams(width=message.width, length_penalty=length_penalty, early_stopping=message.early_stopping)


def _stop_from_pb(message: v1.SequenceGroup, beam_width: int, limits: ModelLimits) -> StopConditions:
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    if max_tokens is not None:
        most, meaning = max_tokens, "max_tokens"
    else:
        most, meaning = (
            limits.max_tokens_left(len(message.prompt_token_ids), beam_width),
            "what context and cache leave",
        )
    # A prompt that leaves nothing has a refusal of its own.
    require(message.min_tokens <= max(most, 0), "min_tokens", message.min_tokens, f"at most {meaning} ({most})")
    require_length(0, bounds.MAX_STOP_TOKENS_ON_WIRE, "stop_token_ids", message.stop_token_ids)
    check_token_ids("stop_token_ids", message.stop_token_ids, limits.vocab_size)
    require_length(0, bounds.MAX_STOP_SEQUENCES, "stop_token_sequences", message.stop_token_sequences)
    for i, stop in enumerate(message.stop_token_sequences):
        field = f"stop_token_sequences[{i}].token_ids"
        require_length(1, bounds.MAX_STOP_SEQUENCE_TOKENS, field, stop.token_ids)
        check_token_ids(field, stop.token_ids, limits.vocab_size)
    return StopConditions(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        eos_token_ids=frozenset() if message.ignore_eos else limits.eos_token_ids,
        stop_token_ids=frozenset(message.stop_token_ids),
        stop_token_sequences=tuple(tuple(stop.token_ids) for stop in message.stop_token_sequences),
    )
