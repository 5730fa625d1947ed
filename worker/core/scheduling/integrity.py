"""Whether the scheduler's parts agree with each other."""

from collections.abc import Iterator

from worker.core.scheduling.state import SchedulerState
from worker.core.sequence import Sequence, SequenceStatus


def integrity_slices(state: SchedulerState) -> Iterator[None]:
    """Raises `RuntimeError` unless every sequence is in exactly one place and the pools agree with what is held.

    In slices: between two of them nothing must change; stop at any.
    """
    held: dict[int, int] = {}
    host_held: dict[int, int] = {}
    num_groups = 0
    for seq in _placed(state):
        _count(held, seq.block_table)
        _count(host_held, seq.host_block_table)
        num_groups += seq.group_id >= 0
    for free in state.holdings.deferred:
        _count(held, free.block_table)
        num_groups += free.group_id >= 0
    _check_slots(state)
    if sorted(seq.id for seq in state.seniority.sequences()) != sorted(seq.id for seq in state.running()):
        raise RuntimeError("seniority: not of those that run")
    yield from state.blocks.integrity_slices(held, host_held, num_groups)


def _placed(state: SchedulerState) -> Iterator[Sequence]:
    """Every sequence, from the one place that it is in."""
    seen: set[int] = set()
    for place in (
        state.waiting.sequences(),
        state.swapped.sequences(),
        state.running(),
        state.groups.parked(),
        state.leaders.followers(),
    ):
        for seq in place:
            if seq.id in seen or seq.is_ended:
                raise RuntimeError(f"sequence {seq.id} ({seq.status.name}) is in two places, or ended")
            if seq.status is not SequenceStatus.RUNNING and (seq.block_table or seq.slot >= 0):
                raise RuntimeError(f"sequence {seq.id} holds blocks or a slot while {seq.status.name}")
            seen.add(seq.id)
            yield seq
    # A root that handed over to its beams is nowhere itself.
    lost = state.sequences.keys() - seen - state.beam_groups.keys()
    if lost:
        raise RuntimeError(f"sequences {sorted(lost)} are nowhere")


def _check_slots(state: SchedulerState) -> None:
    slots = [seq.slot for seq in state.running() if seq.beam_group is None] + state.holdings.free_slots
    slots += [slot for group in state.beam_groups.values() for slot in group.slots]
    if sorted(slots) != list(range(state.config.max_num_seqs)):
        raise RuntimeError("slots: one is lost or belongs to two")


def _count(held: dict[int, int], blocks: list[int]) -> None:
    for block in blocks:
        held[block] = held.get(block, 0) + 1
