"""What counts as load of a worker."""

import math

from fissile.v1 import RequestOutput, WorkerLoad
from router.fleet.load import LoadTracker


def tracker(*groups: tuple[int, int]) -> LoadTracker:
    """With open groups: sequences and tokens to compute of each. Ids count from 1."""
    load = LoadTracker(block_size=16)
    for num_sequences, num_tokens in groups:
        first = load.num_open + 1
        load.opened(range(first, first + num_sequences), num_tokens)
    return load


def test_load_that_others_put_on_a_worker_counts():
    load = tracker((1, 0), (1, 0))
    load.reported(WorkerLoad(num_running=5, num_waiting=2, num_swapped=1))
    assert load.num_sequences == 8
    load.closed(1)
    assert load.num_sequences == 7
    load.opened([3, 4], 0)
    assert load.num_sequences == 9


def test_a_report_older_than_what_was_just_sent_takes_nothing_off():
    load = tracker((3, 100))
    load.reported(WorkerLoad(num_running=1))
    assert (load.num_sequences, load.num_prefill_tokens) == (3, 100)


def test_a_prompt_counts_until_the_first_answer_to_its_group():
    load = tracker((2, 100), (1, 30))
    assert (load.num_prefill_tokens, load.awaits_answers) == (130, True)
    load.answered(1)
    load.answered(2)
    load.answered(1)
    assert (load.num_prefill_tokens, load.awaits_answers) == (30, True)
    load.closed(3)
    assert (load.num_sequences, load.num_prefill_tokens, load.awaits_answers) == (2, 0, False)


def test_prompts_of_others_that_wait_count():
    load = tracker((1, 100))
    load.reported(WorkerLoad(num_waiting_tokens=250))
    assert load.num_prefill_tokens == 250
    load.answered(1)
    assert load.num_prefill_tokens == 150


def test_the_cache_counts_in_tokens_once_the_worker_has_said_how_it_is_made():
    load = tracker()
    load.reported(WorkerLoad(num_running=1))
    assert (load.num_kv_tokens, load.num_free_tokens) == (0, math.inf)
    load.reported(WorkerLoad(num_blocks=30, num_used_blocks=10))
    assert (load.num_kv_tokens, load.num_free_tokens) == (160, 320)


def test_reset_forgets_everything():
    load = tracker((3, 100))
    load.reported(WorkerLoad(num_running=9, num_blocks=9, num_used_blocks=9, num_waiting_tokens=999))
    load.reset()
    assert load == LoadTracker(block_size=16)


def test_a_newcomer_finds_room_where_few_wait_for_their_first_token():
    """A quarter of what runs, on a worker that has nobody waiting; four long prompts are enough, too."""
    tracker = LoadTracker()
    for number in range(64):
        assert tracker.has_room
        tracker.opened([number], 10)
    assert not tracker.has_room
    tracker.reported(WorkerLoad(num_running=1000))
    assert tracker.has_room
    tracker.reported(WorkerLoad(num_running=1000, num_waiting=64))
    assert not tracker.has_room
    tracker.reset()
    for number in range(4):
        assert tracker.has_room
        tracker.opened([number], 20_000)
    assert not tracker.has_room
    tracker.answered(0)
    assert tracker.has_room


def test_a_worker_has_enough_to_begin_with_while_four_groups_wait_for_their_first_token():
    load = tracker((1, 10), (1, 10), (1, 10))
    assert not load.has_enough
    load.opened([4], 10)
    assert load.has_enough
    load.answered(2)
    assert not load.has_enough


def test_what_answers_a_group_goes_before_the_rest_of_a_step():
    load = tracker((2, 10), (2, 10))
    step = [(9, 7), (1, 0), (1, 1), (8, 4), (3, 0)]
    outputs = [RequestOutput(sequence_id=number, token_offset=offset) for number, offset in step]

    def delivered():
        for output in load.newcomers_first(outputs):
            load.answered(output.sequence_id)
            yield output.sequence_id, output.token_offset

    assert [*delivered()] == [(1, 0), (3, 0), (9, 7), (1, 1), (8, 4)]
    assert [*delivered()] == step, "nobody waits for a first token any more"
