"""Core → what routers get, in this one place."""

import time
from collections.abc import Iterator

from google.protobuf import duration_pb2
from google.rpc import code_pb2

from fissile import v1
from fissile.errors import (
    FieldViolation,
    FissileError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from worker.core.batch import TokenLogprobs
from worker.core.errors import InvalidSequenceError, QueueFullError
from worker.core.outputs import LoadSnapshot, SequenceOutput, SequenceTimings
from worker.core.stopping import FinishReason

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

MAX_PART_ENTRIES = 8192
"""Log probabilities in one output; those of a long prompt come in several, of about 70 kB."""
MAX_RESPONSE_BYTES = 4 * 1024 * 1024
"""What came of a step travels in several messages where one would be larger."""
MAX_DETAIL_CHARACTERS = 1024

_CORE_FIELDS = {"token_ids": "prompt_token_ids", "beam.width": "sampling.beam_search.width", "n": "sequences"}
"""Fields of the core that have another name on the wire."""


class EngineLostError(UnavailableError):
    """The worker failed while it had a sequence, which may be the reason."""


def add_output(response: v1.ExecuteResponse, output: SequenceOutput, sequence_id: int) -> None:
    """As one, but for the log probabilities of a long prompt. Made in place: a copy costs as much again."""
    entries = output.prompt_logprobs
    if entries is None:
        _add_news(response, output, sequence_id)
        return
    num_positions = max(1, MAX_PART_ENTRIES // len(entries[0]))
    for start in range(0, len(entries), num_positions):
        response.outputs.add(
            sequence_id=sequence_id,
            index=output.index,
            token_offset=output.token_offset,
            prompt_logprobs=map(logprobs_to_pb, entries[start : start + num_positions]),
            prompt_logprobs_offset=output.prompt_logprobs_offset + start,
        )


def pieces_of(response: v1.ExecuteResponse) -> Iterator[v1.ExecuteResponse]:
    """Itself or, where it is too large, several with its outputs in order."""
    outputs = response.outputs
    if len(outputs) <= 1 or response.ByteSize() <= MAX_RESPONSE_BYTES:
        yield response
        return
    half = len(outputs) // 2
    for part in (outputs[:half], outputs[half:]):
        yield from pieces_of(
            v1.ExecuteResponse(
                step=response.step, outputs=part, load=response.load, last_sequence_id=response.last_sequence_id
            )
        )


def _add_news(response: v1.ExecuteResponse, output: SequenceOutput, sequence_id: int) -> None:
    message = response.outputs.add(
        sequence_id=sequence_id, index=output.index, token_offset=output.token_offset, token_ids=output.token_ids
    )
    if output.logprobs is not None:
        message.logprobs.extend([logprobs_to_pb(entries) for entries in output.logprobs])
    if output.timings is not None:
        message.num_cached_tokens = output.num_cached_tokens
        message.timings.CopyFrom(_timings_to_pb(output.timings))
    if output.finish_reason is not None:
        _add_ending(message, output, output.finish_reason)


def logprobs_to_pb(entries: TokenLogprobs) -> v1.PositionLogprobs:
    token_ids, values, ranks = zip(*entries, strict=True)
    return v1.PositionLogprobs(token_ids=token_ids, logprobs=values, ranks=ranks)


def _add_ending(message: v1.RequestOutput, output: SequenceOutput, reason: FinishReason) -> None:
    message.finish_reason = _FINISH_REASONS[reason]
    message.detail = output.detail
    if reason is FinishReason.ERROR:
        message.error_code = code_pb2.INVALID_ARGUMENT if output.is_request_fault else code_pb2.INTERNAL
        message.field = "sampling" if output.is_request_fault else ""
    if reason in _STOPPED_BY_TOKEN and output.token_ids:
        message.stop_token_id = output.token_ids[-1]
    if output.timings is not None:
        message.num_draft_tokens = output.timings.num_draft_tokens
        message.num_accepted_tokens = output.timings.num_accepted_tokens
    if output.hypotheses is not None:
        del message.token_ids[:]
        for hypothesis in output.hypotheses:
            message.hypotheses.add(
                token_ids=hypothesis.token_ids,
                score=hypothesis.score,
                finish_reason=_FINISH_REASONS[hypothesis.finish_reason],
            )


def _timings_to_pb(timings: SequenceTimings) -> v1.WorkerTimings:
    phases = timings.phases(time.monotonic())
    return v1.WorkerTimings(
        num_preemptions=timings.num_preemptions,
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
    """The terminal output of a sequence that could not be run. The field is that of the first violation."""
    violation = error.violations[0] if error.violations else FieldViolation("", error.message)
    return v1.RequestOutput(
        sequence_id=sequence_id,
        index=index,
        finish_reason=v1.FINISH_REASON_ERROR,
        detail=violation.description[:MAX_DETAIL_CHARACTERS],
        field=violation.field,
        error_code=error.code.value[0],
        worker_failed=isinstance(error, EngineLostError),
    )


def load_to_pb(load: LoadSnapshot) -> v1.WorkerLoad:
    return v1.WorkerLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_swapped=load.num_swapped,
        num_waiting_tokens=load.num_waiting_tokens,
        num_blocks=load.num_blocks,
        num_used_blocks=load.num_used_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_prefix_queries=load.num_prefix_queries,
        num_prefix_hits=load.num_prefix_hits,
        num_preemptions=load.num_preemptions,
        num_evictions=load.num_evictions,
        num_generated_tokens=load.num_generated_tokens,
        num_draft_tokens=load.num_draft_tokens,
        num_accepted_tokens=load.num_accepted_tokens,
        num_groups=load.num_groups,
        num_used_groups=load.num_used_groups,
    )


def refusal_to_error(error: InvalidSequenceError | QueueFullError) -> FissileError:
    """The scheduler's refusal, as an error that has a status."""
    if isinstance(error, QueueFullError):
        return ResourceExhaustedError(str(error))
    return InvalidArgumentError.of(_CORE_FIELDS.get(error.field, error.field), error.message)
