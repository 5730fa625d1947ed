"""Which tokens the constrained rows of a step may get, found by a helper thread while the device runs the step.

A slot's matcher follows the slot's tokens as the steps bring them: those of earlier bindings at first, then each step's
own inputs. A token that the host did not know when the step was scheduled comes from the step that sampled it.
"""

from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from worker.core.batch import DEFERRED_TOKEN, NewSequence, ScheduledBatch
from worker.core.params import Grammar
from worker.grammars.compiler import GrammarCompiler, error_of
from worker.grammars.errors import GrammarError
from worker.kernels.transfer import to_device


class SampledStep(Protocol):
    """A step that the device may still be running, as far as masks have to do with it."""

    grammar_errors: dict[int, str]
    """Batch row → why its grammar can give it no token."""

    @property
    def sampled_rows(self) -> list[int]:
        """Batch row of each token that is sampled; those of one row stand together."""

    def new_tokens(self, index: int) -> list[int]:
        """Those that count of the row whose first one is that of `sampled_rows[index]`; negative if it could not be
        sampled. Waits for the device."""


@dataclass(frozen=True, slots=True)
class _Filled:
    bits: Tensor
    """int32 [constrained tokens, V / 32 rounded up], on the host: a bit for each token that is allowed."""
    errors: dict[int, str]
    """Index of a row's first sampled token → why it can get none; its bits mean nothing."""


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """The masks of one step, being filled."""

    rows: "list[_Row]"
    """That are constrained."""
    filled: Future[_Filled]
    device: torch.device

    def take(self, step: SampledStep) -> Tensor:
        """int32 [S, V / 32 rounded up] on the device, for all tokens that `step` samples: all ones where there is no
        grammar. Waits for the helper. Tells `step` which rows failed, and the slots that `step` samples for them."""
        filled = self.filled.result()
        rows = step.sampled_rows
        step.grammar_errors = {rows[index]: error for index, error in filled.errors.items()}
        for row in self.rows:
            row.slot.sampled = (step, row.index)
        bits = to_device(filled.bits, self.device)
        if len(bits) == len(rows):
            return bits
        indices = torch.tensor([row.index + number for row in self.rows for number in range(row.num_masks)])
        everything = torch.full((len(rows), bits.shape[1]), -1, dtype=torch.int32, device=self.device)
        return everything.index_copy_(0, to_device(indices, self.device), bits)


@dataclass(slots=True)
class _Slot:
    """The grammar of a slot's sequence. Its matcher belongs to the helper thread."""

    new: NewSequence
    grammar: Grammar
    matcher: LLMatcher | None = None
    num_tokens: int = 0
    """Tokens of the sequence, prompt included, that the matcher has seen."""
    sampled: tuple[SampledStep, int] | None = None
    """The last step that sampled for it, and which of that step's sampled tokens was its first."""


@dataclass(frozen=True, slots=True)
class _Row:
    slot: _Slot
    num_computed_tokens: int
    """Position of the first of `input_ids`."""
    input_ids: "array[int]"
    """Without drafts."""
    drafts: "array[int]"
    index: int
    """Of its first sampled token, among those of the step."""

    @property
    def num_masks(self) -> int:
        """One for each of its sampled tokens."""
        return 1 + len(self.drafts)


class SlotGrammars:
    """Grammars of all slots. Used by the runner's thread; a step's masks are taken before the next step starts."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int, device: torch.device, num_threads: int) -> None:
        """`num_threads` fill masks."""
        self.compiler = compiler
        self._num_words = -(-vocab_size // 32)
        self._device = device
        self._slots: dict[int, _Slot] = {}
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._fillers = LLExecutor(num_threads)

    def start(self, batch: ScheduledBatch, sampled_rows: list[int]) -> PendingMasks | None:
        """Take over the batch's news about slots, and begin with its masks; None if no row needs one. `sampled_rows`:
        see `SampledStep`."""
        for new in batch.new_sequences:
            if new.sampling.grammar is None:
                self._slots.pop(new.slot, None)
            else:
                self._slots[new.slot] = _Slot(new, new.sampling.grammar)
        if not self._slots:
            return None
        indices = {row: i for i, row in reversed(list(enumerate(sampled_rows))) if batch.slots[row] in self._slots}
        if not indices:
            return None
        ends = list(accumulate(batch.num_scheduled_tokens))
        rows = []
        for row, index in reversed(indices.items()):
            start, end = ends[row] - batch.num_scheduled_tokens[row], ends[row]
            known = end - batch.num_draft_tokens.get(row, 0)
            slot, num_computed = self._slots[batch.slots[row]], batch.num_computed_tokens[row]
            rows.append(_Row(slot, num_computed, batch.input_ids[start:known], batch.input_ids[known:end], index))
        return PendingMasks(rows, self._helper.submit(self._fill, rows), self._device)

    def has_any(self, slots: Iterable[int]) -> bool:
        """Whether one of them has a grammar, before the news of the next batch."""
        return not self._slots.keys().isdisjoint(slots)

    # Everything below runs on the helper thread.

    def _fill(self, rows: list[_Row]) -> _Filled:
        num_masks = sum(row.num_masks for row in rows)
        bits = torch.full((num_masks, self._num_words), -1, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        errors: dict[int, str] = {}
        ready: list[tuple[LLMatcher, int]] = []
        firsts: dict[int, _Row] = {}
        at = 0
        for row in rows:
            firsts[at] = row
            try:
                ready += _matchers(self._advance(row), row.drafts, at)
            except GrammarError as error:
                errors[row.index] = str(error)
            at += row.num_masks
        if ready:
            self._compute(ready, bits)
        for matcher, i in ready:
            if matcher.is_error() and i in firsts:
                errors[firsts[i].index] = error_of(matcher)
            elif matcher.is_error():
                bits[i] = 0  # left to the next step, where it is the first
        return _Filled(bits, {index: f"structured output: {error}" for index, error in errors.items()})

    def _compute(self, ready: list[tuple[LLMatcher, int]], bits: Tensor) -> None:
        num_words = self.compiler.mask_words
        if num_words == bits.shape[1]:
            self._fillers.unsafe_compute_mask_ptr(ready, bits.data_ptr(), num_words * 4, len(bits))
            return
        # The tokenizer has more tokens than the model has logits.
        wide = torch.full((len(bits), num_words), -1, dtype=torch.int32)
        self._fillers.unsafe_compute_mask_ptr(ready, wide.data_ptr(), num_words * 4, len(wide))
        bits.copy_(wide[:, : bits.shape[1]])

    def _advance(self, row: _Row) -> LLMatcher:
        """The row's matcher, all tokens before the one to be sampled seen. Raises GrammarError."""
        slot = row.slot
        if slot.matcher is None:
            slot.matcher = self.compiler.matcher(slot.grammar)
            slot.num_tokens = len(slot.new.token_ids)
            _consume(slot.matcher, list(slot.new.token_ids[slot.new.num_prompt_tokens :]))
        num_seen = slot.num_tokens - row.num_computed_tokens
        if num_seen < 0:
            # Drafts that were right: of what came of the last step, all but the last token is computed already.
            accepted = _new_tokens(slot)[:-num_seen]
            if len(accepted) < -num_seen:
                raise RuntimeError(f"a matcher has seen {slot.num_tokens} of {row.num_computed_tokens} computed tokens")
            slot.num_tokens += len(accepted)
            _consume(slot.matcher, accepted)
            num_seen = 0
        fresh = [_new_tokens(slot)[0] if token == DEFERRED_TOKEN else token for token in row.input_ids[num_seen:]]
        slot.num_tokens += len(fresh)
        _consume(slot.matcher, fresh)
        return slot.matcher


def _matchers(matcher: LLMatcher, drafts: "array[int]", first: int) -> Iterator[tuple[LLMatcher, int]]:
    """`matcher`, and copies of it that have seen the drafts up to each that it allows, counted from `first`. Behind one
    that it does not allow no token counts: what is sampled in its place is another."""
    yield matcher, first
    for number, draft in enumerate(drafts, first + 1):
        matcher = matcher.deep_copy()
        if not matcher.consume_tokens([draft]):
            return
        yield matcher, number


def _consume(matcher: LLMatcher, token_ids: list[int]) -> None:
    if not matcher.consume_tokens(token_ids):
        raise GrammarError(error_of(matcher))


def _new_tokens(slot: _Slot) -> list[int]:
    """Waits for the step that sampled them."""
    if slot.sampled is None:
        return []
    step, index = slot.sampled
    tokens = step.new_tokens(index)
    if tokens[0] < 0:
        raise GrammarError("its last token could not be sampled")
    return tokens
