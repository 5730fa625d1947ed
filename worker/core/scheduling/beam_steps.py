"""Beam searches in the scheduler: start, collect the candidates of a round, choose, fork."""

from worker.core.beam import BeamSearch, Candidates, NextBeam
from worker.core.scheduling.state import SchedulerState
from worker.core.sequence import BeamGroup, Sequence, SequenceStatus
from worker.core.tokens import token_array


class BeamSteps:
    """A round of a search: every beam runs its tokens, in whatever step there is room; when all have, beams are chosen.

    A beam is an ordinary running sequence in between: it can be preempted and computed again.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._blocks = state.blocks
        self._num_made = 0

    def start(self, root: Sequence) -> None:
        """Makes the search of a sequence that is being added."""
        assert root.beam is not None
        search = BeamSearch(root.beam, root.stop, root.num_prompt_tokens, root.max_length)
        root.beam_group = BeamGroup(root, search, [root])
        self._state.beam_groups[root.id] = root.beam_group

    def receive(self, member: Sequence, candidates: Candidates) -> None:
        """What the row of a beam returned; with the last one of the round the search advances."""
        group = member.beam_group
        assert group is not None
        group.candidates[member.id] = candidates
        if group.root.time_first_token is None:
            group.root.time_first_token = self._state.clock()
        if len(group.candidates) < len(group.members):
            return
        next_beams = group.search.advance(
            [beam.token_ids for beam in group.members], [group.candidates[beam.id] for beam in group.members]
        )
        if next_beams:
            self._fork(group, next_beams)
        else:
            self._finish(group)

    def _fork(self, group: BeamGroup, next_beams: list[NextBeam]) -> None:
        parents = group.members
        group.candidates.clear()
        group.members = [self._make(group, at, parents[beam.parent], beam) for at, beam in enumerate(next_beams)]
        self._share_memory(
            parents, [(parents[beam.parent], member) for beam, member in zip(next_beams, group.members, strict=True)]
        )
        # Only after all forks, so that no block that lives on is free in between.
        for parent in parents:
            self._state.drop_beam(parent)
        for member in group.members:
            if member.status is SequenceStatus.WAITING:
                self._state.enqueue(member)
            else:
                self._state.adopt_beam(member)
        self._state.release_idle_slots(group)

    def _make(self, group: BeamGroup, at: int, parent: Sequence, beam: NextBeam) -> Sequence:
        root = group.root
        self._num_made += 1
        # Internal ids are negative: they never meet those of public sequences.
        member = Sequence(
            id=-self._num_made,
            token_ids=parent.token_ids + token_array([beam.token]),
            num_prompt_tokens=root.num_prompt_tokens,
            stop=root.stop,
            sampling=root.sampling,
            priority=root.priority,
            cache_salt=root.cache_salt,
            arrival_time=root.arrival_time,
        )
        member.order = (root.order[0], root.order[1], at)
        member.max_length = root.max_length
        member.num_preemptions = parent.num_preemptions
        member.time_queued = root.time_queued
        member.time_scheduled = root.time_scheduled
        member.beam_group = group
        return member

    def _share_memory(self, parents: list[Sequence], forks: list[tuple[Sequence, Sequence]]) -> None:
        """Lets each child of a running (parent, child) run on from what the parent has computed; others wait and are
        computed again."""
        running = [fork for fork in forks if fork[0].status is SequenceStatus.RUNNING]
        for parent, member in running:
            self._blocks.fork(parent, member, parent.num_computed_tokens)
            member.num_computed_tokens = parent.num_computed_tokens
            member.chain = parent.chain.copy() if parent.chain is not None else None
            member.anchor = parent.anchor
            member.publish_at = parent.publish_at
            member.move_to(SequenceStatus.RUNNING)
        for source, group in self._blocks.groups.hand_on(parents, running):
            self._state.holdings.states_to_copy[group] = source

    def _finish(self, group: BeamGroup) -> None:
        root, best = group.root, group.search.hypotheses[0]
        tokens = list(best.token_ids)
        root.token_ids.extend(tokens)
        self._state.end(root, best.finish_reason, "", tokens, group.search.hypotheses)
