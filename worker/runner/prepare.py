"""Phase 1 of a step, prepare: from a `ScheduledBatch` to the step's buffers, by one copy and one operation."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.core.batch import ScheduledBatch
from worker.kernels.prepare import PREPARE_STEP
from worker.kernels.select import Kernels
from worker.kernels.step import Chunk, Round, StagedRows, Step, StepBuffers
from worker.runner.slots import SlotState
from worker.runner.staging import Staging
from worker.sampling.verify import Drafts


class StepInputs(NamedTuple):
    """What the runner needs of a step beside the buffers. Rows are in the step's order, not the batch's."""

    step: Step
    rows: StagedRows
    sampled_rows: list[int]
    """Batch row of each token that is sampled, in the order of the tensors below: a row with drafts is there as many
    times as it has tokens."""
    other_rows: list[int]
    """Batch rows that get none: all but the last chunk of a prompt."""
    last_tokens: Tensor
    """int64 [S + U]: after which token of the step each one is sampled, and the last token of each of the others."""
    sampled: Tensor | None
    """int64 [S]: which of the step's rows these are; None: the first S."""
    longest_sampled: int
    """Upper bound of these; 0 if there is none."""
    drafts: Drafts | None
    """None: no row has drafts."""
    prompt: "PromptInputs | None"
    """None: nobody asks for log probabilities of prompt tokens of this step."""

    @property
    def wanted(self) -> Tensor | None:
        """The tokens whose last hidden state is needed; None: all, or as good as all."""
        num_last = len(self.sampled_rows) + len(self.other_rows)
        return None if self.prompt is not None or num_last == self.step.num_tokens else self.last_tokens

    @property
    def is_uniform(self) -> bool:
        """A token is sampled after each of the step's, in their order, but for padding."""
        return not self.step.chunks

    def of_sampled(self, by_row: Tensor) -> Tensor:
        """The sampled rows' elements of a tensor that has one for each row of the step, and maybe more behind them."""
        return first(by_row, len(self.sampled_rows)) if self.sampled is None else by_row.index_select(0, self.sampled)


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """Tokens of this step that another prompt token follows, in rows that ask for log probabilities of those."""

    rows: list[tuple[int, int, int]]
    """(batch row, how many, most likely tokens that it asks for), in the order of the tensors below."""
    step_tokens: Tensor
    """int64 [P]: which token of the step."""
    slots: Tensor
    """int64 [P]"""
    next_positions: Tensor
    """int64 [P]: position, in its sequence, of the token that follows."""


class StepPreparer:
    """Owns the buffers: brings a step's rows to the device, and fills them in."""

    def __init__(
        self,
        slots: SlotState,
        buffers: StepBuffers,
        kernels: Kernels,
        block_size: int,
        uniform_sizes: Sequence[int] = (),
    ) -> None:
        """`uniform_sizes`: rising; a step of uniform rows alone is padded to the next of these numbers of rows."""
        self.buffers = buffers
        self._slots, self._block_size, self._uniform_sizes = slots, block_size, uniform_sizes
        self._kernel = kernels.choose(PREPARE_STEP, None, torch.int64)
        self._staging = Staging(kernels.device)
        max_rows = len(buffers.context_lens)
        self._places = torch.arange(max_rows, device=kernels.device)
        self._ones = torch.ones(max_rows, dtype=torch.int64, device=kernels.device)
        self._row_slots = torch.full_like(self._places, slots.spare_slot)
        """Of uniform rows, in one place, where graphs find them."""
        self._staged_slots: list[int] = []
        """What the host last sent there."""
        self._uniform_rows: dict[int, StagedRows] = {}
        """By their number: most steps have as many as the one before."""
        self._spare_row = StagedRows(self._row_slots[:1].clone(), self._places[:1], self._ones[:1])

    def prepare(self, batch: ScheduledBatch, together: Round | None = None) -> StepInputs:
        """Apply the batch's deltas to the slots and bring its rows to the device: `fill` is what follows. Does not wait
        for the device."""
        news = self._slots.stage(batch)
        order, num_uniform = _uniform_first(batch)
        if num_uniform == len(batch.slots):
            return self._prepare_uniform(batch, news, together)
        slots, computed, lens = (
            np.array(values)[order] for values in (batch.slots, batch.num_computed_tokens, batch.num_scheduled_tokens)
        )
        ends, first_tokens = computed + lens, lens.cumsum() - lens
        step = Step(
            num_uniform_rows=num_uniform,
            chunks=tuple(map(Chunk, lens[num_uniform:].tolist(), ends[num_uniform:].tolist())),
            max_context_len=int(ends.max()),
            round=together,
        )
        sampled = [place for place, row in enumerate(order) if batch.samples[row]]
        others = [place for place, row in enumerate(order) if not batch.samples[row]]
        prompt_rows = self._prompt_rows(batch, order)
        last_tokens = first_tokens + lens - 1
        arrays = {
            "slots": slots,
            "starts": computed,
            "lens": lens,
            "sampled": np.array(sampled, np.int64),
            "last_tokens": last_tokens[sampled + others],
        }
        width = 1 + max(batch.num_draft_tokens.values(), default=0)
        if width > 1:
            arrays |= _draft_arrays(batch, order, sampled, others, last_tokens, width)
        staged = self._to_device(arrays | news | _prompt_arrays(batch, prompt_rows, first_tokens))
        drafts = None
        if width > 1:
            drafts = Drafts(staged["has_draft"], staged["draft_rows"], staged["firsts"], width)
        return StepInputs(
            step=step,
            rows=StagedRows(staged["slots"], staged["starts"], staged["lens"]),
            sampled_rows=[order[place] for place in arrays["sampled"].tolist()],
            other_rows=[order[place] for place in others],
            last_tokens=staged["last_tokens"],
            sampled=staged["sampled"],
            longest_sampled=int(ends[sampled].max(initial=0)),
            drafts=drafts,
            prompt=PromptInputs(
                [(row, num, most) for _, row, num, most in prompt_rows],
                staged["prompt_tokens"], staged["prompt_slots"], staged["prompt_positions"],
            ) if prompt_rows else None,
        )  # fmt: skip

    def _prepare_uniform(
        self, batch: ScheduledBatch, news: dict[str, np.ndarray], together: Round | None
    ) -> StepInputs:
        """A step of uniform rows alone: the host sends which slots they are, and the device knows the rest."""
        num_rows = len(batch.slots)
        longest = max(batch.num_computed_tokens) + 1
        if news:
            self._to_device(news)
        step, rows = self.stage_uniform(batch.slots, longest, together)
        return StepInputs(
            step=step,
            rows=rows,
            sampled_rows=list(range(num_rows)),
            other_rows=[],
            last_tokens=self.uniform_rows(num_rows).starts,  # places
            sampled=None,
            longest_sampled=longest,
            drafts=None,
            prompt=None,
        )

    def stage_uniform(
        self, slots: list[int], max_context_len: int, together: Round | None = None
    ) -> tuple[Step, StagedRows]:
        """A step of uniform rows alone, one of each of these slots, and padding. Its rows stand where those of the
        last such step stood, and most steps have the same: nothing is sent then."""
        padding = self._padding(len(slots), together)
        padded = slots + [self._slots.spare_slot] * padding if padding else slots
        if padded != self._staged_slots:
            self._staging.copy(padded, self._row_slots)
            self._staged_slots = padded
        num_rows = len(padded)
        step = Step(
            num_uniform_rows=num_rows, max_context_len=max_context_len, num_padding_rows=padding, round=together
        )
        return step, self.uniform_rows(num_rows)

    def num_staged(self, slots: list[int]) -> int | None:
        """Rows, padding included, of a step of uniform rows of these slots, where they are those of the last such step:
        then nothing has to be sent."""
        padded = slots + [self._slots.spare_slot] * self._padding(len(slots), None)
        return len(padded) if padded == self._staged_slots else None

    def spare_row(self, together: Round | None) -> tuple[Step, StagedRows]:
        """A step of the spare slot's token alone. What is staged stays."""
        return Step(num_uniform_rows=1, max_context_len=1, round=together), self._spare_row

    def uniform_rows(self, num_rows: int) -> StagedRows:
        """Those of the last step of uniform rows alone, always in the same place; `starts` are their places."""
        rows = self._uniform_rows.get(num_rows)
        if rows is None:
            rows = StagedRows(self._row_slots[:num_rows], self._places[:num_rows], self._ones[:num_rows])
            self._uniform_rows[num_rows] = rows
        return rows

    def fill(self, rows: StagedRows, step: Step) -> None:
        """The buffers, from what the device knows of the rows."""
        self._kernel(rows, self._slots.tables, step, self._block_size, self.buffers)

    def prepare_padding(self) -> None:
        """Fill the buffers with a step of padding rows alone, as many as there can be."""
        num_rows = len(self._places)
        self._row_slots.fill_(self._slots.spare_slot)
        self._staged_slots = [self._slots.spare_slot] * num_rows
        step = Step(num_uniform_rows=num_rows, max_context_len=1, num_padding_rows=num_rows)
        self.fill(self.uniform_rows(num_rows), step)

    def _to_device(self, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
        """The arrays on the device, and the slots there brought up to date with what is new in them."""
        staged = self._staging.to_device(arrays)
        self._slots.apply(staged)
        return staged

    def _padding(self, num_rows: int, together: Round | None) -> int:
        """To the size of a graph, which is the same for all ranks that step together."""
        if together is not None and not together.is_uniform:
            return 0
        at = bisect_left(self._uniform_sizes, num_rows if together is None else together.num_tokens)
        return self._uniform_sizes[at] - num_rows if at < len(self._uniform_sizes) else 0

    def _prompt_rows(self, batch: ScheduledBatch, order: list[int]) -> list[tuple[int, int, int, int]]:
        """(place in the step's order, batch row, how many of its tokens another prompt token follows, most likely
        tokens that it asks for)."""
        found = []
        asking = self._slots.prompt_logprobs
        for place, row in enumerate(order if asking else ()):
            asked = asking.get(batch.slots[row])
            if asked is not None:
                left = asked.num_prompt_tokens - 1 - batch.num_computed_tokens[row]
                num = min(batch.num_scheduled_tokens[row], left)
                if num > 0:
                    found.append((place, row, num, asked.num_most_likely))
        return found


def first(x: Tensor, num: int) -> Tensor:
    """x[:num]. To ask whether a view is needed takes less than to make one, and `len` of a tensor is Python."""
    return x if x.shape[0] == num else x[:num]


def _uniform_first(batch: ScheduledBatch) -> tuple[list[int], int]:
    """(rows, those of one token that ends the known sequence first, else in the batch's order; how many those are)."""
    is_uniform = [num == 1 and samples for num, samples in zip(batch.num_scheduled_tokens, batch.samples, strict=True)]
    uniform = [row for row, yes in enumerate(is_uniform) if yes]
    return uniform + [row for row, yes in enumerate(is_uniform) if not yes], len(uniform)


def _draft_arrays(
    batch: ScheduledBatch, order: list[int], sampled: list[int], others: list[int], last_tokens: np.ndarray, width: int
) -> dict[str, np.ndarray]:
    """Where rows have drafts: `StepInputs.sampled` and `last_tokens` with an element for each token that is sampled,
    and what `Drafts` has. `sampled` and `others` are places in the step's order, as is `last_tokens`."""
    num_drafts = np.array([batch.num_draft_tokens.get(order[place], 0) for place in sampled])
    num_tokens = 1 + num_drafts
    firsts = num_tokens.cumsum() - num_tokens
    number = np.arange(num_tokens.sum()) - firsts.repeat(num_tokens)
    return {
        "sampled": np.array(sampled, np.int64).repeat(num_tokens),
        "last_tokens": np.concatenate(
            [(last_tokens[sampled] - num_drafts).repeat(num_tokens) + number, last_tokens[others]]
        ),
        "has_draft": (number < num_drafts.repeat(num_tokens)).astype(np.int64),
        "draft_rows": np.arange(len(sampled)).repeat(num_tokens) * width + number,
        "firsts": firsts,
    }


def _prompt_arrays(
    batch: ScheduledBatch, rows: list[tuple[int, int, int, int]], first_tokens: np.ndarray
) -> dict[str, np.ndarray]:
    """`first_tokens`: index of each row's first token in the step, in the step's order."""
    if not rows:
        return {}
    return {
        "prompt_tokens": np.concatenate([first_tokens[place] + np.arange(num) for place, _, num, _ in rows]),
        "prompt_slots": np.concatenate([np.full(num, batch.slots[row]) for _, row, num, _ in rows]),
        "prompt_positions": np.concatenate(
            [batch.num_computed_tokens[row] + 1 + np.arange(num) for _, row, num, _ in rows]
        ),
    }
