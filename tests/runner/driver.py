"""A minimal scheduler for tests: gives out slots and blocks, builds batches, keeps the tokens of each sequence."""

from dataclasses import dataclass, field

from torch import Tensor

from worker.core.batch import DEFERRED_TOKEN, BatchOutput, NewSequence, ScheduledBatch
from worker.core.params import SamplingParams
from worker.core.tokens import token_array
from worker.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Seq:
    slot: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    bound: bool = False
    error: str | None = None
    in_flight: int = 0
    """Sampled on the device, not yet in `tokens`."""

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def feed(self, token: int) -> None:
        """A known token in place of the last sampled one: the slot is bound anew, or it would go on with its own."""
        self.tokens[-1] = token
        self.bound = False


def cache_of(runner: ModelRunner) -> list[Tensor]:
    """Of a model with one kind of attention, blocks + spare first; in torch K and V, [.., layers, block_size, K, D]."""
    return [entry.tensor for entry in runner._parts.builders[0].entry_tensors()]


class Driver:
    """Runs sequences through a runner or an executor-like object with `execute`."""

    def __init__(
        self, runner: ModelRunner, num_blocks: int, block_size: int, num_groups: int = 0, *, scatter: bool = True
    ) -> None:
        """`num_groups`: of per-request state; a sequence has that of its slot's number from behind."""
        self.runner = runner
        self.block_size = block_size
        self.num_groups = num_groups
        # Blocks far apart and out of order, so that a wrong table cannot pass by luck.
        order = [*range(1, num_blocks, 2), *range(0, num_blocks, 2)]
        self.free = order[::-1] if scatter else list(range(num_blocks))[::-1]
        self.step = 0
        self.num_slots = 0

    def add(self, prompt: list[int], sampling: SamplingParams = GREEDY, prefix: Seq | None = None) -> Seq:
        """With `prefix`, reuse its full computed blocks, as a prefix hit would; not where there is state."""
        seq = Seq(self.num_slots, list(prompt), len(prompt), sampling)
        self.num_slots += 1
        if prefix is not None and not self.num_groups:
            same = 0
            while same < len(prompt) - 1 and same < prefix.num_computed and prompt[same] == prefix.tokens[same]:
                same += 1
            seq.blocks = prefix.blocks[: same // self.block_size]
            seq.num_computed = len(seq.blocks) * self.block_size
        return seq

    def batch(self, work: list[tuple[Seq, int]], **extra: object) -> ScheduledBatch:
        """One step that computes `n` tokens of each sequence."""
        new, deltas, ids, samples = [], [], [], []
        for seq, num in work:
            end = seq.num_computed + num
            grown = [self.free.pop() for _ in range(-(-end // self.block_size) - len(seq.blocks))]
            seq.blocks += grown
            if not seq.bound:
                tokens, group = token_array(seq.tokens), self.num_groups - 1 - seq.slot if self.num_groups else -1
                new.append(NewSequence(seq.slot, tokens, seq.num_prompt, seq.sampling, tuple(seq.blocks), group))
                seq.bound = True
            elif grown:
                deltas.append((seq.slot, grown))
            known = seq.tokens[seq.num_computed : end]
            ids += known + [DEFERRED_TOKEN] * (num - len(known))
            samples.append(end >= len(seq.tokens) + seq.in_flight)
        made = ScheduledBatch(
            step=self.step,
            slots=[seq.slot for seq, _ in work],
            num_scheduled_tokens=[num for _, num in work],
            num_computed_tokens=[seq.num_computed for seq, _ in work],
            input_ids=token_array(ids),
            samples=samples,
            new_sequences=new,
            new_block_ids=deltas,
            **extra,  # type: ignore[arg-type]
        )
        self.step += 1
        for (seq, num), sampled in zip(work, samples, strict=True):
            seq.num_computed += num
            seq.in_flight += sampled
        return made

    def commit(self, work: list[tuple[Seq, int]], output: BatchOutput) -> None:
        for row, (seq, _) in enumerate(work):
            seq.tokens += output.token_ids[row]
            seq.in_flight -= len(output.token_ids[row])
            seq.error = output.errors.get(row, seq.error)

    def run(self, work: list[tuple[Seq, int]], **extra: object) -> BatchOutput:
        output = self.runner.execute(self.batch(work, **extra))
        self.commit(work, output)
        return output

    def prefill(self, *seqs: Seq) -> BatchOutput:
        return self.run([(seq, len(seq.tokens) - seq.num_computed) for seq in seqs])

    def decode(self, *seqs: Seq, steps: int = 1) -> None:
        for _ in range(steps):
            self.run([(seq, 1) for seq in seqs])

    def verify(self, seq: Seq, drafts: list[int]) -> None:
        """One step that tries `drafts` behind the last token."""
        seq.tokens += drafts
        batch = self.batch([(seq, 1 + len(drafts))], num_draft_tokens={0: len(drafts)})
        del seq.tokens[-len(drafts) :]
        seq.tokens += self.runner.execute(batch).token_ids[0]
        seq.num_computed, seq.in_flight = len(seq.tokens) - 1, 0
