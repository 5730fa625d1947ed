"""Whatever happens, in whatever order: every stream is that of an undisturbed run, and nothing leaks."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.core.builders import Engine, expected_hypotheses, expected_output, make_group, make_sequence
from tests.core.drafters import RandomDrafter
from worker.core.errors import InvalidSequenceError, QueueFullError
from worker.core.params import BeamParams
from worker.core.scheduling.preemption import belongs_to_senior
from worker.core.sequence import Sequence
from worker.core.stopping import ABORT_REASONS, FinishReason

MAX_MODEL_LEN = 48
SHARED = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 4
"""Prompts begin alike, so that they meet in the prefix index."""

configs = st.fixed_dictionaries(
    {
        "async_depth": st.sampled_from([0, 1]),
        "scheduling_policy": st.sampled_from(["prefill_first", "chunked"]),
        "preemption_mode": st.sampled_from(["recompute", "swap"]),
        "preemption_policy": st.sampled_from(["fcfs", "priority", "shortest_remaining", "cheapest_recompute"]),
        "prefix": st.sampled_from(["off", "hash", "radix"]),
        "block_size": st.sampled_from([1, 16]),
        "max_num_seqs": st.integers(2, 6),
        "max_num_batched_tokens": st.sampled_from([16, 48]),
        "max_prefill_chunk": st.sampled_from([0, 5, 16]),
        "decode_quota": st.integers(1, 3),
        "watermark": st.sampled_from([0.0, 0.1]),
        "scheduler_delay_factor": st.sampled_from([0.0, 0.0, 2.0]),
    }
)
prompts = st.tuples(st.integers(0, 36), st.lists(st.integers(0, 3), min_size=1, max_size=4)).map(
    lambda drawn: SHARED[: drawn[0]] + drawn[1]
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine = None  # type: ignore[assignment]
        self.added: dict[int, Sequence] = {}
        self.expected: dict[int, tuple[list[int], FinishReason]] = {}
        self.expected_beams: dict[int, list] = {}
        self.may_fail = False
        self.may_preempt = False
        """By the test: then the bound on preemptions does not hold."""
        self.next_id = 0

    @initialize(
        config=configs,
        blocks=st.integers(4, 9),
        host_blocks=st.integers(1, 5),
        may_preempt=st.booleans(),
        num_checkpoints=st.integers(0, 3),
        num_drafts=st.sampled_from([0, 0, 1, 3, 7]),
        drafts_seed=st.integers(0, 99),
    )
    def start(
        self,
        config: dict,
        blocks: int,
        host_blocks: int,
        may_preempt: bool,
        num_checkpoints: int,
        num_drafts: int,
        drafts_seed: int,
    ) -> None:
        """With `num_checkpoints`, of a model with state, which is not swapped."""
        self.may_preempt = may_preempt
        if num_drafts:
            config = config | {"async_depth": 0, "num_speculative_tokens": num_drafts}
            config["drafter"] = RandomDrafter(drafts_seed)
        if num_checkpoints:
            config = config | {"preemption_mode": "recompute", "num_groups": config["max_num_seqs"]}
            config["num_checkpoints"] = num_checkpoints if config["prefix"] != "off" else 0
        blocks_of_16 = 16 // config["block_size"]
        swaps = config["preemption_mode"] == "swap"
        self.engine = Engine(
            **config,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=blocks * blocks_of_16,
            num_host_blocks=host_blocks * blocks_of_16 if swaps else 0,
            max_num_waiting=12,
            secure=not swaps and not num_checkpoints,
        )

    def admit(self, sequences: list[Sequence]) -> None:
        wanted = {
            seq.id: expected_hypotheses(seq, MAX_MODEL_LEN) if seq.beam else expected_output(seq, MAX_MODEL_LEN)
            for seq in sequences
        }
        try:
            if len(sequences) == 1:
                self.engine.scheduler.add(sequences[0])
            else:
                self.engine.scheduler.add_group(sequences)
        except (InvalidSequenceError, QueueFullError):
            assert all(not self.engine.scheduler.abort(seq.id) for seq in sequences)
            return
        self.added |= {seq.id: seq for seq in sequences}
        for seq in sequences:
            (self.expected_beams if seq.beam else self.expected)[seq.id] = wanted[seq.id]

    def take_id(self, num: int = 1) -> int:
        self.next_id += num
        return self.next_id - num

    @rule(
        prompt=prompts,
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        num_resumed=st.integers(0, 3),
        eos=st.sampled_from([(), (0,), (0, 1)]),
        stop_sequences=st.sampled_from([(), (), ((2, 3), (4,))]),
        min_tokens=st.integers(0, 4),
        priority=st.integers(0, 2),
        salt=st.sampled_from([b"", b"", b"tenant"]),
        deadline=st.one_of(st.none(), st.integers(1, 10)),
    )
    def add(self, prompt, max_tokens, num_resumed, eos, stop_sequences, min_tokens, priority, salt, deadline) -> None:
        sequence = make_sequence(
            self.take_id(),
            prompt,
            max_tokens,
            eos=eos,
            stop_sequences=stop_sequences,
            min_tokens=min_tokens,
            priority=priority,
            salt=salt,
            seed=self.next_id % 3,
            deadline=None if deadline is None else self.engine.clock.now + deadline,
        )
        self.resume(sequence, num_resumed)
        self.admit([sequence])

    @rule(
        prompt=prompts,
        resumed=st.lists(st.sampled_from([0, 0, 1, 3]), min_size=2, max_size=4),
        max_tokens=st.integers(1, 12),
    )
    def add_group(self, prompt: list[int], resumed: list[int], max_tokens: int) -> None:
        group = make_group(self.take_id(len(resumed)), prompt, len(resumed), max_tokens)
        for sequence, num_resumed in zip(group, resumed, strict=True):
            self.resume(sequence, num_resumed)
        self.admit(group)

    def resume(self, sequence: Sequence, num_resumed: int) -> None:
        """As after so many tokens on another worker, if it gets that far."""
        tokens, _ = expected_output(sequence, MAX_MODEL_LEN)
        if num_resumed and len(tokens) > num_resumed:
            sequence.token_ids.extend(tokens[:num_resumed])
            sequence.num_resumed_tokens = num_resumed

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 8),
        width=st.integers(1, 4),
        early_stopping=st.booleans(),
        length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
    )
    def add_beams(self, prompt, max_tokens, width, early_stopping, length_penalty) -> None:
        beam = BeamParams(width=width, early_stopping=early_stopping, length_penalty=length_penalty)
        self.admit([make_sequence(self.take_id(), prompt, max_tokens, eos=(0,), beam=beam)])

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.added:
            sequence_id = data.draw(st.sampled_from(sorted(self.added)))
            self.engine.scheduler.abort(sequence_id)
            assert sequence_id not in self.engine.scheduler._state.sequences
            self.engine.check()

    @precondition(lambda self: self.may_preempt and self.engine.num_in_flight <= self.engine.config.async_depth)
    @rule(data=st.data(), num=st.integers(1, 3), aborts_one=st.booleans())
    def preempt(self, data: st.DataObject, num: int, aborts_one: bool) -> None:
        """Any but the senior may have to go at any time, whoever it is for, and be aborted before the next step."""
        for at in range(num):
            victim = data.draw(st.sampled_from([None, *self.juniors()]))
            if victim is not None:
                self.engine.scheduler._state.preempt(victim)
                if aborts_one and at == 0:
                    self.engine.scheduler.abort(victim.id)
                self.engine.check()
        self.engine.submit()

    def juniors(self) -> list[Sequence]:
        """All that run but the senior, in their order."""
        running = sorted(self.engine.scheduler._state.running(), key=lambda seq: seq.order)
        return [seq for seq in running if not belongs_to_senior(seq, running[0])]

    @rule(seconds=st.sampled_from([0.01, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.engine.clock.now += seconds

    @rule()
    def clear_cache(self) -> None:
        self.engine.scheduler.clear_prefix_cache()
        self.engine.check()

    @precondition(lambda self: self.engine and self.engine.num_in_flight <= self.engine.config.async_depth)
    @rule(num=st.integers(1, 6))
    def step(self, num: int) -> None:
        for _ in range(num):
            self.engine.step()

    @precondition(lambda self: self.engine and self.engine.num_in_flight <= self.engine.config.async_depth)
    @rule()
    def submit(self) -> None:
        self.engine.submit()

    @precondition(lambda self: self.engine and self.engine.num_in_flight)
    @rule()
    def retire(self) -> None:
        self.engine.retire()

    @precondition(lambda self: self.engine and self.engine.num_in_flight <= self.engine.config.async_depth)
    @rule(slot=st.integers(0, 5))
    def step_with_failure(self, slot: int) -> None:
        self.may_fail = True
        self.engine.runner.failing_slots = {slot}
        self.engine.submit()
        self.engine.runner.failing_slots = set()

    def teardown(self) -> None:
        if self.engine is None:
            return
        while self.engine.num_in_flight > self.engine.config.async_depth:
            self.engine.retire()
        self.engine.run()
        self.engine.assert_drained()
        assert self.engine.ended.keys() == self.added.keys()
        for sequence_id, (tokens, reason) in self.expected.items():
            self.check_stream(sequence_id, tokens, reason)
        for sequence_id, hypotheses in self.expected_beams.items():
            ended = self.engine.ended[sequence_id]
            if ended.finish_reason not in ABORT_REASONS:
                assert ended.hypotheses == hypotheses
                assert ended.token_ids == hypotheses[0].token_ids
        assert self.may_preempt or all(seq.num_preemptions <= 3 for seq in self.added.values())

    def check_stream(self, sequence_id: int, tokens: list[int], reason: FinishReason) -> None:
        ended = self.engine.ended[sequence_id]
        got = self.engine.tokens[sequence_id]
        if ended.finish_reason in ABORT_REASONS:
            assert got == tokens[: len(got)]
            assert ended.finish_reason is not FinishReason.ERROR or self.may_fail
        else:
            assert (got, ended.finish_reason) == (tokens, reason)


@pytest.mark.soak
def test_any_order_of_events(is_soak: bool) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=3000 if is_soak else 120,
            stateful_step_count=100 if is_soak else 60,
            derandomize=not is_soak,
            suppress_health_check=list(HealthCheck),
        ),
    )
