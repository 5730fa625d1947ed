"""What a fake worker is asked for, and how it answers that: refusals, steps, log probabilities."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from fissile.errors import FissileError
from fissile.v1 import (
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    SamplingParams,
    Sequence,
    SequenceGroup,
)
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.errors import InvalidSequenceError
from worker.core.scheduling.feasibility import check_group, check_sequence
from worker.face.convert_group import ModelLimits, group_from_pb
from worker.face.convert_outputs import logprobs_to_pb, refusal_to_error

EOS = 2
BLOCK_SIZE = 16
NUM_BLOCKS = 100_000
MAX_NUM_SEQS = 128


@dataclass(frozen=True)
class Asked:
    """A sequence, with what it shares with its group."""

    group: SequenceGroup
    member: Sequence

    @property
    def id(self) -> int:
        return self.member.id

    @property
    def index(self) -> int:
        return self.member.index

    @property
    def request_id(self) -> str:
        return self.group.request_id

    @property
    def token_ids(self) -> list[int]:
        """Prompt, then tokens generated earlier."""
        return [*self.group.prompt_token_ids, *self.member.token_ids]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.group.prompt_token_ids)

    @property
    def sampling(self) -> SamplingParams:
        """With the sequence's own seed."""
        sampling = SamplingParams()
        sampling.CopyFrom(self.group.sampling)
        sampling.seed = self.member.seed
        return sampling

    @property
    def is_first(self) -> bool:
        return self.member.id == self.group.sequences[0].id


Script = Callable[[Asked], list[int]]
"""All tokens of a completion, from its first one on, whatever part of it the sequence brings along."""


class Running:
    """A sequence and what it gets, made step by step."""

    def __init__(self, sequence: Asked, outputs: Iterator[RequestOutput]) -> None:
        self.sequence = sequence
        self._outputs = outputs
        self.is_aborted = False
        self.next = next(outputs)
        """What it gets in its next step."""

    def abort(self) -> None:
        """It owes an ending even then, which comes with its next step."""
        self.is_aborted = True
        self.next = RequestOutput(
            index=self.sequence.index,
            token_offset=self.next.token_offset,
            finish_reason=FinishReason.FINISH_REASON_ABORTED,
            detail="aborted by the router",
        )

    def take(self) -> RequestOutput:
        output = self.next
        output.sequence_id = self.sequence.id
        if not output.finish_reason:
            self.next = next(self._outputs)
        return output


def refusal_of(group: SequenceGroup, vocab_size: int, max_model_len: int) -> FissileError | None:
    """Of a worker with these, by its own checks."""
    limits = ModelLimits(vocab_size, max_model_len, BLOCK_SIZE, NUM_BLOCKS, frozenset({EOS}))
    config = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=max(max_model_len, MAX_NUM_SEQS),
    )
    cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    try:
        sequences = group_from_pb(group, range(1, 1 + len(group.sequences)), limits)
        for sequence in sequences:
            check_sequence(sequence, config, cache)
        if len(sequences) > 1:
            check_group(sequences, config)
    except FissileError as error:
        return error
    except InvalidSequenceError as error:
        return refusal_to_error(error)
    return None


def logprobs_of(token_ids: list[int], num_likely: int) -> list[PositionLogprobs]:
    """What a fake worker says of tokens: each is the third in rank, behind tokens 100, 101 …"""
    return [_logprobs_of(token_id, num_likely) for token_id in token_ids]


@cache
def _logprobs_of(token_id: int, num_likely: int) -> PositionLogprobs:
    return logprobs_to_pb(entries_of(token_id, num_likely))


def entries_of(token_id: int, num_likely: int) -> list[tuple[int, float, int]]:
    return [(token_id, -2.5, 3), *((100 + i, -0.5 - i, 1 + i) for i in range(num_likely))]
