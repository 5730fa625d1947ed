"""An executor without processes: the core tests' fake runner, with a gate that holds results back, and a way to die."""

import pickle
import threading
import time
from concurrent.futures import Future

from tests.core.fake_runner import FakeRunner
from worker.core.batch import BatchOutput, ScheduledBatch
from worker.core.params import Grammar
from worker.executor.errors import ExecutorDiedError, ExecutorStartError
from worker.executor.profiles import Profiles
from worker.loader.config import ModelConfig
from worker.loader.rope import RopeConfig
from worker.runner.config import MemoryReport, ModelInfo
from worker.runner.messages import ProfileDone

VOCAB_SIZE = 100
EOS = 3
"""One of the 11 tokens that the fake model generates."""

MODEL = ModelConfig(
    architecture="FakeForCausalLM", hidden_size=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1,
    intermediate_size=1, vocab_size=VOCAB_SIZE, max_model_len=64, rms_norm_eps=1e-5, rope=RopeConfig(1.0),
    tie_word_embeddings=True, eos_token_ids=(EOS,),
)  # fmt: skip


class RankThatProfiles:
    """Answers what it is told about profiles, at once."""

    def __init__(self, profiles):
        self._profiles = profiles

    def send(self, message: bytes) -> None:
        self._profiles.settle(0, ProfileDone(pickle.loads(message).number, None))


class FakeGrammars:
    def __init__(self):
        self.compiles: dict[Grammar, Future[None]] = {}
        """What was asked for."""
        self.kept: set[Grammar] = set()
        self.compiles_at_once = True
        """While this is not set, tests settle `compiles`."""

    def compile(self, grammar: Grammar) -> "Future[None]":
        future: Future[None] = Future()
        if self.compiles_at_once:
            future.set_result(None)
        self.compiles[grammar] = future
        assert grammar not in self.kept
        self.kept.add(grammar)
        return future

    def release(self, grammar: Grammar) -> None:
        self.kept.remove(grammar)


class FakeExecutor:
    def __init__(self, on_rank_end=lambda: None, num_blocks=64, block_size=16, max_model_len=64):
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self.runner = FakeRunner(num_blocks, block_size)
        self.num_groups = self.num_checkpoints = 0
        """State groups of the model, and what is kept of them."""
        self.loading = threading.Event()
        """`start` returns once this is set."""
        self.loading.set()
        self.open = threading.Event()
        """Results come while this is set."""
        self.open.set()
        self.grammars = FakeGrammars()
        self.step_seconds = 0.0
        self.start_error: str | None = None
        self.raises_in_submit: Exception | None = None
        self.num_submitted = 0
        self.is_shut_down = False
        self.lockstep_group = ""
        self.profiles = Profiles()
        self.profiles.attach([RankThatProfiles(self.profiles)])
        self._on_rank_end = on_rank_end
        self._is_dead = False

    def start(self) -> ModelInfo:
        assert self.loading.wait(180)
        if self.start_error is not None:
            raise ExecutorStartError(self.start_error)
        return ModelInfo(
            config=MODEL, dtype="float32", device="cpu", kernels={"all": "fake"}, block_size=self.block_size,
            num_blocks=self.num_blocks, num_groups=self.num_groups,
            num_checkpoints=self.num_checkpoints, num_host_blocks=0, max_model_len=self.max_model_len,
            memory=MemoryReport(weights=0, activations=0, graphs=0, kv_cache=0, state=0, swap=0, num_cache_tokens=0),
        )  # fmt: skip

    def submit(self, batch: ScheduledBatch) -> None:
        self.check()
        if self.raises_in_submit is not None:
            raise self.raises_in_submit
        self.num_submitted += 1
        self.runner.submit(batch)

    def collect(self, timeout: float) -> BatchOutput:
        assert self.open.wait(180)
        time.sleep(self.step_seconds)
        self.check()
        return self.runner.collect(timeout)

    def check(self) -> None:
        if self._is_dead:
            raise ExecutorDiedError("rank 0 was killed by signal 9\nIts last words:\n(nothing)")

    def die(self) -> None:
        self._is_dead = True
        self.open.set()
        self._on_rank_end()

    def announce_stop(self) -> None:
        """Nobody is there to hear it."""

    def shutdown(self) -> None:
        self.is_shut_down = True
