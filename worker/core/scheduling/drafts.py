"""Speculation: rows that try several tokens of a decoding sequence in one step."""

from collections.abc import Sequence as Seq

from worker.core.drafter import Drafter
from worker.core.scheduling.batch_builder import BatchBuilder
from worker.core.scheduling.room import Room
from worker.core.scheduling.state import SchedulerState
from worker.core.sequence import Sequence


class DraftedDecodes:
    """The newest token of each decoding sequence, and behind it what a drafter guesses.

    The model samples its own token at each of these positions. While it equals the draft, the next position has seen
    the right context, so its token counts, too; the first that differs is the last that counts. Tokens are therefore
    those of a run without drafts, and drafts only ever use what is left over: budget beyond a token for every slot,
    and blocks beyond one for every running sequence.
    """

    def __init__(self, state: SchedulerState, room: Room, drafter: Drafter) -> None:
        self._state = state
        self._config = state.config
        self._room = room
        self._drafter = drafter

    def schedule(self, builder: BatchBuilder) -> None:
        """A row for every decoding sequence that finds room. Nothing may be in flight."""
        self._drafter.begin_step()
        budget = self._config.max_num_batched_tokens - self._config.max_num_seqs
        for seq in list(self._state.decoding.values()):
            if seq.slot < 0:
                continue  # preempted for an earlier row
            drafts = self._drafts_of(seq, budget)
            num_tokens = seq.num_tokens + len(drafts)
            if num_tokens > seq.num_block_tokens and not self._room.provide(seq, num_tokens, builder):
                continue
            builder.add_decode(seq, drafts)
            budget -= len(drafts)

    def _drafts_of(self, seq: Sequence, budget: int) -> Seq[int]:
        """None beyond its limit, where each of them and the token after could still be kept."""
        most = min(budget, self._config.num_speculative_tokens, seq.draft_limit, seq.max_length - seq.num_tokens - 1)
        if most < 1:
            return ()
        drafts = self._drafter.propose(seq, most)
        blocks = self._state.blocks
        num_missing = blocks.num_blocks_for(seq.num_tokens + len(drafts)) - len(seq.block_table)
        if num_missing > 0 and not blocks.pool.can_take(num_missing + self._state.num_running):
            return drafts[: max(seq.num_block_tokens - seq.num_tokens, 0)]
        return drafts
