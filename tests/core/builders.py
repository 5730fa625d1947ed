"""Builders of what the core tests need, and the engine loop over scheduler and fake runner."""

from collections.abc import Callable

from common.block_hash import unpack_tokens
from tests.core.fake_runner import FakeRunner, log_probs, next_token
from worker.core.batch import ScheduledBatch
from worker.core.beam import BeamSearch
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.drafter import Drafter
from worker.core.outputs import Hypothesis, SequenceOutput
from worker.core.params import BeamParams, SamplingParams, StopConditions
from worker.core.scheduler import Scheduler
from worker.core.sequence import Sequence
from worker.core.stopping import FinishReason, find_stop
from worker.engine.steps import Steps


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_sequence(
    id: int,
    prompt: list[int] | int,
    max_tokens: int | None = 4,
    *,
    output: list[int] | None = None,
    eos: tuple[int, ...] = (),
    stop_ids: tuple[int, ...] = (),
    stop_sequences: tuple[tuple[int, ...], ...] = (),
    min_tokens: int = 0,
    seed: int = 0,
    priority: int = 0,
    deadline: float | None = None,
    salt: bytes = b"",
    parent_id: int | None = None,
    index: int = 0,
    beam: BeamParams | None = None,
) -> Sequence:
    """`prompt` as a number makes that many tokens, different for every id."""
    tokens = [1000 * id + at for at in range(prompt)] if isinstance(prompt, int) else prompt
    return Sequence(
        id=id,
        token_ids=[*tokens, *(output or [])],
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(seed=seed),
        stop=StopConditions(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            eos_token_ids=frozenset(eos),
            stop_token_ids=frozenset(stop_ids),
            stop_token_sequences=stop_sequences,
        ),
        priority=priority,
        deadline=deadline,
        cache_salt=salt,
        parent_id=parent_id,
        index=index,
        beam=beam,
    )


def make_group(id: int, prompt: list[int] | int, n: int, max_tokens: int = 4) -> list[Sequence]:
    """An n > 1 request: ids from `id` on, one prompt, a seed each."""
    parent = make_sequence(id, prompt, max_tokens)
    children = [
        make_sequence(id + at, parent.token_ids, max_tokens, seed=at, parent_id=id, index=at) for at in range(1, n)
    ]
    return [parent, *children]


def expected_output(seq: Sequence, max_model_len: int) -> tuple[list[int], FinishReason]:
    """The oracle: what `seq` (as added) generates when nothing disturbs it. Resumed tokens are not repeated."""
    tokens = list(seq.token_ids)
    start = len(tokens)
    while True:
        token = next_token(tokens, seq.sampling.seed)
        _, reason = find_stop(tokens, [token], seq.num_prompt_tokens, seq.stop, max_model_len)
        tokens.append(token)
        if reason is not None:
            return tokens[start:], reason


def expected_hypotheses(seq: Sequence, max_model_len: int) -> list[Hypothesis]:
    """The oracle of a beam search: no cache, no scheduler, every context from scratch."""
    search = BeamSearch(seq.beam, seq.stop, seq.num_prompt_tokens, max_model_len)
    beams = [list(seq.token_ids)]
    while True:
        scored = [sorted(enumerate(log_probs(beam)), key=lambda pair: -pair[1]) for beam in beams]
        next_beams = search.advance(beams, [best[: search.num_candidates] for best in scored])
        if not next_beams:
            return search.hypotheses
        beams = [[*beams[beam.parent], beam.token] for beam in next_beams]


class Engine:
    """Scheduler and fake runner in the engine's loop, step by step; checks integrity after each operation."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        num_host_blocks: int = 0,
        prefix: str = "hash",
        secure: bool = False,
        num_groups: int = 0,
        num_checkpoints: int = 0,
        hasher: Callable[[bytes], int] | None = None,
        drafter: Drafter | None = None,
        **config: object,
    ) -> None:
        self.clock = Clock()
        self.is_secure = secure
        self.checks_cache = True
        settings: dict = {
            "max_model_len": 256,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "async_depth": 0,
            "watermark": 0.0,
        } | config
        self.config = SchedulerConfig(**settings)
        cache = CacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=prefix != "off",
            prefix_index="radix" if prefix == "radix" else "hash",
            secure=secure,
            num_groups=num_groups,
            num_checkpoints=num_checkpoints,
        )
        more = {"hasher": hasher} if hasher is not None else {}
        self.scheduler = Scheduler(self.config, cache, self.clock, drafter=drafter, **more)
        self.runner = FakeRunner(num_blocks, block_size, num_host_blocks)
        self.steps = Steps(self.scheduler, self.runner, async_depth=self.config.async_depth, step_timeout=0)
        self.tokens: dict[int, list[int]] = {}
        self.offsets: dict[int, int] = {}
        self.ended: dict[int, SequenceOutput] = {}
        self.batches: list[ScheduledBatch] = []

    @property
    def num_in_flight(self) -> int:
        return self.steps.num_in_flight

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self.scheduler.add(seq)
        self.check()

    def submit(self) -> ScheduledBatch | None:
        """Schedules a step and runs it; its output waits."""
        batch = self.steps.submit()
        if batch is not None:
            self.batches.append(batch)
        self.check()
        return batch

    def retire(self) -> None:
        """Hands the scheduler the output of the oldest step."""
        self.steps.finish()
        self.check()

    def step(self) -> ScheduledBatch | None:
        """Schedules one step; with as many in flight as the depth allows, the oldest comes back."""
        batch = self.submit()
        if self.num_in_flight > self.config.async_depth or (batch is None and self.num_in_flight):
            self.retire()
        return batch

    def run(self, max_steps: int = 10_000) -> None:
        """To the end of everything."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished() and not self.num_in_flight:
                self.check()
                return
            before = self.num_in_flight > 0
            self.clock.now += 0.001
            # A step that only ends what is overdue has nothing to run.
            is_moving = self.step() is not None or before or not self.scheduler.has_unfinished()
            assert is_moving, "nothing to run, and sequences are unfinished"
        raise AssertionError(f"not done after {max_steps} steps")

    def check(self) -> None:
        self.scheduler.check_integrity()
        self._check_cache()
        for output in self.scheduler.take_outputs():
            assert output.sequence_id not in self.ended, "news after the terminal output"
            tokens = self.tokens.setdefault(output.sequence_id, [])
            if output.hypotheses is None and tokens:
                assert output.token_offset == self.offsets[output.sequence_id] + len(tokens)
            elif output.hypotheses is None:
                self.offsets[output.sequence_id] = output.token_offset
            tokens += output.token_ids
            if output.finish_reason is not None:
                self.ended[output.sequence_id] = output

    def _check_cache(self) -> None:
        """What can be hit is there and finite; in secure mode nothing else is left in a block that nobody holds."""
        if not self.checks_cache:
            return
        blocks, kv = self.scheduler._blocks, self.runner.kv
        for stored in blocks.index.published() if blocks.index is not None else ():
            assert kv[stored.block_id] == list(unpack_tokens(stored.content, blocks.block_size))
        if self.is_secure:
            for block_id in set(blocks.pool._vacant) - set(blocks.pool._to_zero):
                assert set(kv[block_id]) == {None}, f"block {block_id} is vacant and was not cleared"

    def assert_drained(self) -> None:
        """Nothing is held by anyone."""
        load = self.scheduler.load()
        assert (load.num_running, load.num_waiting, load.num_swapped) == (0, 0, 0)
        assert load.num_free_blocks == load.num_blocks
        assert load.num_used_host_blocks == 0
        assert not self.scheduler.has_unfinished()
