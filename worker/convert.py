"""Protobuf ↔ core, in this one place. What comes in is checked here: a worker does not trust routers."""

import math
import time
from dataclasses import dataclass

from google.protobuf import duration_pb2
from google.rpc import code_pb2

from fissile import v1
from fissile.errors import FissileError, InvalidArgumentError, ResourceExhaustedError
from worker.convert_sampling import check_together, check_token_ids, require, sampling_from_pb
from worker.core.batch import TokenLogprobs
from worker.core.errors import AdmissionError, QueueFullError
from worker.core.outputs import LoadSnapshot, SequenceOutput
from worker.core.params import BeamParams, StopConditions
from worker.core.sequence import FinishReason, Sequence

_FINISH_REASONS: dict[FinishReason, v1.FinishReason] = {
    FinishReason.EOS: v1.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: v1.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_SEQUENCE: v1.FINISH_REASON_STOP_SEQUENCE,
    FinishReason.LENGTH: v1.FINISH_REASON_LENGTH,
    FinishReason.MODEL_LENGTH: v1.FINISH_REASON_MODEL_LENGTH,
    FinishReason.ABORTED: v1.FINISH_REASON_ABORTED,
    FinishReason.DEADLINE: v1.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: v1.FINISH_REASON_ERROR,
}
_STOPPED_BY_TOKEN = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN})

MAX_BEAM_WIDTH = 16


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a sequence is checked against."""

    vocab_size: int
    max_model_len: int
    """Most tokens of a sequence, prompt and output."""
    block_size: int
    num_blocks: int
    eos_token_ids: frozenset[int]

    def max_tokens_left(self, num_prompt_tokens: int, beam_width: int) -> int:
        """Most tokens that fit behind a prompt, in the context and in the KV cache. The last one needs no KV."""
        num_cacheable = self.num_blocks // beam_width * self.block_size + 1
        return min(self.max_model_len, num_cacheable) - num_prompt_tokens


def sequence_from_pb(message: v1.Sequence, engine_id: int, parent_id: int | None, limits: ModelLimits) -> Sequence:
    """A core sequence that arrives now. Raises InvalidArgumentError naming the field."""
    require(message.id > 0, "id", message.id, "1 or more")
    check_token_ids("token_ids", message.token_ids, limits.vocab_size)
    num_tokens, num_prompt_tokens = len(message.token_ids), message.num_prompt_tokens
    require(num_tokens > 0, "token_ids", "[]", "at least 1 token")
    require(1 <= num_prompt_tokens <= num_tokens, "num_prompt_tokens", num_prompt_tokens, f"1 to {num_tokens}")
    now = time.monotonic()
    beam = _beam_from_pb(message.sampling.beam_search) if message.sampling.HasField("beam_search") else None
    sampling = sampling_from_pb(message.sampling, limits.vocab_size)
    check_together(message, sampling)
    return Sequence(
        id=engine_id,
        token_ids=message.token_ids,
        num_prompt_tokens=num_prompt_tokens,
        stop=_stop_from_pb(message, beam.width if beam else 1, limits),
        sampling=sampling,
        priority=message.priority,
        deadline=now + message.deadline_ms / 1000 if message.HasField("deadline_ms") else None,
        cache_salt=message.cache_salt,
        arrival_time=now,
        parent_id=parent_id,
        index=message.index,
        beam=beam,
    )


def _beam_from_pb(message: v1.BeamSearch) -> BeamParams:
    field = "sampling.beam_search"
    require(2 <= message.width <= MAX_BEAM_WIDTH, f"{field}.width", message.width, f"2 to {MAX_BEAM_WIDTH}")
    length_penalty = message.length_penalty if message.HasField("length_penalty") else 1.0
    require(math.isfinite(length_penalty), f"{field}.length_penalty", length_penalty, "a finite number")
    return BeamParams(width=message.width, length_penalty=length_penalty, early_stopping=message.early_stopping)


def _stop_from_pb(message: v1.Sequence, beam_width: int, limits: ModelLimits) -> StopConditions:
    num_generated = len(message.token_ids) - message.num_prompt_tokens
    num_left = limits.max_tokens_left(message.num_prompt_tokens, beam_width)
    max_tokens = message.max_tokens if message.HasField("max_tokens") else max(num_left, 1)
    wanted = f"at least {num_generated + 1}" + (f": {num_generated} are generated already" if num_generated else "")
    require(max_tokens > num_generated, "max_tokens", max_tokens, wanted)
    require(message.min_tokens <= max_tokens, "min_tokens", message.min_tokens, f"at most max_tokens ({max_tokens})")
    check_token_ids("stop_token_ids", message.stop_token_ids, limits.vocab_size)
    for i, stop in enumerate(message.stop_token_sequences):
        require(len(stop.token_ids) > 0, f"stop_token_sequences[{i}]", "[]", "at least 1 token")
        check_token_ids(f"stop_token_sequences[{i}].token_ids", stop.token_ids, limits.vocab_size)
    return StopConditions(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        eos_token_ids=frozenset() if message.ignore_eos else limits.eos_token_ids,
        stop_token_ids=frozenset(message.stop_token_ids),
        stop_token_sequences=tuple(tuple(stop.token_ids) for stop in message.stop_token_sequences),
    )


def check_group(members: list[v1.Sequence]) -> None:
    """`members` are the sequence with index 0 and those that name it as parent. Raises InvalidArgumentError."""
    size = max(members[0].group_size, 1)
    parent_id = members[0].parent_id
    require(parent_id in (0, members[0].id), "parent_id", parent_id, "the id of a sequence of the same message")
    require(len(members) == size, "group_size", size, f"{len(members)}, as many as the message holds")
    indices = sorted(member.index for member in members)
    require(indices == list(range(size)), "index", indices, f"0 to {size - 1}, each once")
    require(len({member.id for member in members}) == size, "id", members[0].id, "an id of its own for each member")
    for member in members[1:]:
        require(member.group_size == size, "group_size", member.group_size, f"{size}, as in the first of the group")
        require(
            member.token_ids[: member.num_prompt_tokens] == members[0].token_ids[: members[0].num_prompt_tokens],
            "token_ids",
            f"of index {member.index}",
            "the prompt of the first of the group",
        )


def output_to_pb(output: SequenceOutput, sequence_id: int) -> v1.RequestOutput:
    message = v1.RequestOutput(
        sequence_id=sequence_id,
        index=output.index,
        token_offset=output.token_offset,
        token_ids=output.token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )
    if output.logprobs is not None:
        message.logprobs.extend([logprobs_to_pb(entries) for entries in output.logprobs])
    if output.prompt_logprobs is not None:
        message.prompt_logprobs.extend([logprobs_to_pb(entries) for entries in output.prompt_logprobs])
    if output.finish_reason is not None:
        _add_ending(message, output, output.finish_reason)
    return message


def logprobs_to_pb(entries: TokenLogprobs) -> v1.TokenLogprobs:
    return v1.TokenLogprobs(
        logprobs=[v1.TokenLogprob(token_id=token, logprob=value, rank=rank) for token, value, rank in entries]
    )


def _add_ending(message: v1.RequestOutput, output: SequenceOutput, reason: FinishReason) -> None:
    message.finish_reason = _FINISH_REASONS[reason]
    message.detail = output.detail
    if reason is FinishReason.ERROR:
        message.error_code = code_pb2.INVALID_ARGUMENT if output.is_request_fault else code_pb2.INTERNAL
    if reason in _STOPPED_BY_TOKEN and output.token_ids:
        message.stop_token_id = output.token_ids[-1]
    if output.timings is not None:
        message.timings.CopyFrom(timings_to_pb(phase_seconds(output), output.timings.num_preemptions))
    if output.hypotheses is not None:
        del message.token_ids[:]
        for hypothesis in output.hypotheses:
            message.hypotheses.add(
                token_ids=hypothesis.token_ids,
                score=hypothesis.score,
                finish_reason=_FINISH_REASONS[hypothesis.finish_reason],
            )


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """How long a sequence spent in each phase; None for those it did not reach."""

    queued: float | None
    prefill: float | None
    decode: float | None


def phase_seconds(output: SequenceOutput) -> PhaseSeconds:
    """Of a terminal output that has just been reported."""
    timings = output.timings
    if timings is None:
        return PhaseSeconds(None, None, None)
    now = time.monotonic()
    if timings.scheduled is None:
        return PhaseSeconds(now - timings.queued, None, None)
    queued = timings.scheduled - timings.queued
    if timings.first_token is None:
        return PhaseSeconds(queued, now - timings.scheduled, None)
    return PhaseSeconds(queued, timings.first_token - timings.scheduled, now - timings.first_token)


def timings_to_pb(phases: PhaseSeconds, num_preemptions: int) -> v1.WorkerTimings:
    return v1.WorkerTimings(
        num_preemptions=num_preemptions,
        queued=duration_to_pb(phases.queued),
        prefill=duration_to_pb(phases.prefill),
        decode=duration_to_pb(phases.decode),
    )


def duration_to_pb(seconds: float | None) -> duration_pb2.Duration | None:
    if seconds is None:
        return None
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def error_to_pb(error: FissileError, sequence_id: int, index: int) -> v1.RequestOutput:
    """The terminal output of a sequence that could not be run."""
    return v1.RequestOutput(
        sequence_id=sequence_id,
        index=index,
        finish_reason=v1.FINISH_REASON_ERROR,
        detail=error.message,
        error_code=error.code.value[0],
    )


def load_to_pb(load: LoadSnapshot) -> v1.WorkerLoad:
    return v1.WorkerLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_swapped=load.num_swapped,
        num_waiting_tokens=load.num_waiting_tokens,
        num_blocks=load.num_blocks,
        num_used_blocks=load.num_blocks_used,
        num_cached_blocks=load.num_blocks_cached,
        num_prefix_queries=load.num_total_prefix_queries,
        num_prefix_hits=load.num_total_prefix_hits,
        num_preemptions=load.num_total_preemptions,
        num_evictions=load.num_total_evictions,
        num_generated_tokens=load.num_total_sampled_tokens,
    )


def refusal_to_error(error: AdmissionError | QueueFullError) -> FissileError:
    """The scheduler's refusal, as an error that has a status."""
    if isinstance(error, QueueFullError):
        return ResourceExhaustedError(str(error))
    return InvalidArgumentError.of(error.field, error.message)
