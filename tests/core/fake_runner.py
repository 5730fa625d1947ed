"""An executor without tensors that takes every word of a `ScheduledBatch` literally.

A block, on the device or the host, holds the tokens whose KV it would hold. The next token is a function of the whole
context, read through the block table, so reading a block that was not written, or is someone else's, cannot go
unnoticed. Blocks are moved in the order of the real runner: clear, swap out, copy, swap in, then the step.

A token in `broken_tokens`, or a row of a slot in `failing_slots`, makes KV that is not finite; so does whatever looks
at such KV, as all later positions do. The rows in question report it, sampled or not.
"""

import math
import struct
import zlib
from array import array
from collections import deque

from worker.core.batch import DEFERRED_TOKEN, BatchOutput, NewSequence, ScheduledBatch

VOCABULARY = 11
NAN = -(1 << 40)
"""In a block: KV that is not finite."""


def next_token(context: list[int], seed: int) -> int:
    """The model: uniform-looking, and dependent on every token of the context."""
    return zlib.crc32(struct.pack(f"<Q{len(context)}q", seed, *context)) % VOCABULARY


def log_probs(context: list[int]) -> list[float]:
    """Log softmax over the vocabulary, as strange and as deterministic as `next_token`."""
    packed = struct.pack(f"<{len(context)}q", *context)
    logits = [zlib.crc32(packed, token + 1) / 2**32 * 4 for token in range(VOCABULARY)]
    norm = math.log(sum(math.exp(logit) for logit in logits))
    return [logit - norm for logit in logits]


Entries = list[list[int | None]] | dict[int, list[int]]


class _Slot:
    def __init__(self, bound: NewSequence) -> None:
        self.table = list(bound.block_ids)
        self.tokens = list(bound.token_ids)
        self.seed = bound.sampling.seed
        self.group = bound.group_id


class FakeRunner:
    """Runs each step when it is handed in; the caller decides when it collects the output."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[int | None]] = [[None] * block_size for _ in range(num_host_blocks)]
        self.states: dict[int, list[int]] = {}
        """Of each state group: the tokens that its state has taken in."""
        self.slots: dict[int, _Slot] = {}
        self.next_step = 0
        self.num_tokens = 0
        self.failing_slots: set[int] = set()
        self.broken_tokens: set[int] = set()
        self._outputs: deque[BatchOutput] = deque()

    def submit(self, batch: ScheduledBatch) -> None:
        self._outputs.append(self.run(batch))

    def collect(self, timeout: float) -> BatchOutput:
        return self._outputs.popleft()

    def run(self, batch: ScheduledBatch) -> BatchOutput:
        assert batch.step == self.next_step
        self.next_step += 1
        self._move_blocks(batch)
        self._bind(batch)
        assert len(set(batch.slots)) == len(batch.slots) > 0
        assert batch.num_tokens == sum(batch.num_scheduled_tokens)
        self.num_tokens += batch.num_tokens
        outputs: list[list[int]] = []
        errors: dict[int, str] = {}
        candidates: dict[int, list[tuple[int, float]]] = {}
        at = 0
        for row, slot in enumerate(batch.slots):
            num, start = batch.num_scheduled_tokens[row], batch.num_computed_tokens[row]
            input_ids = batch.input_ids[at : at + num]
            at += num
            if row in batch.num_draft_tokens:
                assert batch.samples[row] and row not in batch.beam_rows
                outputs.append(self._verify(slot, start, input_ids, batch.num_draft_tokens[row]))
                if not outputs[row]:
                    errors[row] = "output is not finite"
                continue
            context = self._compute(slot, start, input_ids)
            outputs.append([])
            if context is None:
                errors[row] = "output is not finite"
                if batch.samples[row]:
                    # A step that was scheduled before this is known will read something.
                    self.slots[slot].tokens.append(0)
            elif not batch.samples[row]:
                continue
            elif row in batch.beam_rows:
                scored = sorted(enumerate(log_probs(context)), key=lambda pair: -pair[1])
                candidates[row] = scored[: batch.num_candidates]
            else:
                token = next_token(context, self.slots[slot].seed)
                self.slots[slot].tokens.append(token)
                outputs[row] = [token]
        return BatchOutput(step=batch.step, token_ids=outputs, errors=errors, candidates=candidates, run_seconds=0.01)

    def _verify(self, slot: int, start: int, input_ids: "array[int]", num_drafts: int) -> list[int]:
        """The tokens of a row of one known token and drafts; none if not even the first can be sampled."""
        state = self.slots[slot]
        assert num_drafts > 0 and len(input_ids) == 1 + num_drafts and start + 1 == len(state.tokens)
        known = list(state.tokens)
        state.tokens += input_ids[1:]
        self._compute(slot, start, input_ids)
        found: list[int] = []
        for position, draft in enumerate([*input_ids[1:], None], start=start):
            if self.kv[state.table[position // self.block_size]][position % self.block_size] == NAN:
                break
            found.append(next_token([*known, *found], state.seed))
            if found[-1] != draft:
                break
        state.tokens = [*known, *found]
        if state.group >= 0:
            # What was wrong has never been, for whoever copies the state, too.
            del self.states[state.group][start + len(found) :]
        return found

    def _move_blocks(self, batch: ScheduledBatch) -> None:
        for block in batch.blocks_to_zero:
            self.kv[block] = [None] * self.block_size
        _copy(self.kv, self.host, batch.blocks_to_swap_out)
        sources = {source for source, _ in batch.blocks_to_copy}
        assert not sources & {destination for _, destination in batch.blocks_to_copy}
        _copy(self.kv, self.kv, batch.blocks_to_copy)
        _copy(self.host, self.kv, batch.blocks_to_swap_in)

    def _bind(self, batch: ScheduledBatch) -> None:
        bound = {new.slot for new in batch.new_sequences}
        assert len(bound) == len(batch.new_sequences)
        assert bound <= set(batch.slots)
        for slot, blocks in batch.new_block_ids:
            assert slot not in bound
            self.slots[slot].table += blocks
        for slot, index, block in batch.replaced_block_ids:
            assert slot not in bound
            self.slots[slot].table[index] = block
        _copy(self.states, self.states, batch.states_to_copy)
        for new in batch.new_sequences:
            if new.group_id >= 0:
                self.states[new.group_id] = list(self.states[new.restored_group]) if new.restored_group >= 0 else []
            self.slots[new.slot] = _Slot(new)

    def _compute(self, slot: int, start: int, input_ids: "array[int]") -> list[int] | None:
        """Writes the KV of the row's tokens; returns its context as the blocks have it, None if that is not finite."""
        state = self.slots[slot]
        size = self.block_size
        assert input_ids
        past = [self.kv[state.table[at // size]][at % size] for at in range(start)]
        is_broken = NAN in past or slot in self.failing_slots
        if state.group >= 0:
            seen = self.states[state.group]
            is_broken = is_broken or NAN in seen
            assert NAN in seen or seen == state.tokens[:start], f"slot {slot}: state of {seen}"
        for position, token in enumerate(input_ids, start=start):
            if token == DEFERRED_TOKEN:
                token = state.tokens[position]
            assert token == state.tokens[position], f"slot {slot}: wrong input at {position}"
            is_broken = is_broken or token in self.broken_tokens
            self.kv[state.table[position // size]][position % size] = NAN if is_broken else token
            if state.group >= 0:
                self.states[state.group].append(NAN if is_broken else token)
        end = start + len(input_ids)
        assert end <= len(state.tokens)
        context = [self.kv[state.table[at // size]][at % size] for at in range(end)]
        wanted = [have if have == NAN else token for have, token in zip(context, state.tokens[:end], strict=True)]
        assert context == wanted, f"slot {slot}: context {context} is not {state.tokens[:end]}"
        return None if is_broken else state.tokens[:end]


def _copy(source: Entries, destination: Entries, pairs: list[tuple[int, int]]) -> None:
    """All reads before all writes, as one batched copy may do; no destination twice."""
    assert len({to for _, to in pairs}) == len(pairs)
    contents = [list(source[block]) for block, _ in pairs]
    for (_, to), content in zip(pairs, contents, strict=True):
        destination[to] = content
