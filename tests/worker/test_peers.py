"""Workers whose ranks step together: who is let in, who is missed, and what one hears of the others."""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from common.config import parse_settings
from tests.fakes.ports import free_port
from tests.fakes.tiny_model import write_tiny_model
from worker.config import WorkerSettings
from worker.executor import peers
from worker.executor.errors import ExecutorError, ExecutorStartError, ExecutorTimeoutError
from worker.executor.peers import PeerListener, Peers, PeerSettings
from worker.runner.config import RunnerConfig

HOST, SECRET, STORE_PORT = "127.0.0.1", b"a secret of ranks", 4711
WAIT = 20.0


@dataclass
class Worker:
    """`lost` and `stops` are what it hears; `outcome` what came of meeting."""

    settings: PeerSettings
    config: RunnerConfig
    lost: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    stops: "queue.SimpleQueue[bool]" = field(default_factory=queue.SimpleQueue)
    outcome: int | ExecutorError | None = None

    def __post_init__(self) -> None:
        self.peers = Peers(self.settings, self.config, self.lost.put, lambda: self.stops.put(True))

    def meet(self, seconds: float = WAIT) -> None:
        try:
            self.outcome = self.peers.meet(STORE_PORT + self.config.dp_rank, time.monotonic() + seconds)
        except ExecutorError as error:
            self.outcome = error
            self.peers.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PAUSE_SECONDS", 0.02)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunnerConfig:
    model = write_tiny_model(tmp_path_factory.mktemp("peers") / "model")
    return RunnerConfig(model=str(model), load_format="dummy", expert_parallel=True, dp_size=3)


def workers_of(config: RunnerConfig) -> list[Worker]:
    settings = PeerSettings(host=HOST, port=free_port(), secret=SECRET, stop_seconds=0)
    return [Worker(settings, replace(config, dp_rank=rank)) for rank in range(3)]


def meeting_rank_0(config: RunnerConfig, change: dict[str, object], secret: bytes = SECRET) -> str:
    """What another worker is told by one that waits for it."""
    host, other, _ = workers_of(config)
    listener = PeerListener(host.settings, host.config)
    other = Worker(replace(host.settings, secret=secret), replace(other.config, **change))  # type: ignore[arg-type]
    other.meet()
    listener.close()
    assert isinstance(other.outcome, ExecutorStartError)
    return str(other.outcome)


def meet(workers: list[Worker], *, seconds: float = WAIT) -> list[int | ExecutorError | None]:
    threads = [threading.Thread(target=worker.meet, args=(seconds,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    return [worker.outcome for worker in workers]


@pytest.fixture
def met(config: RunnerConfig) -> Iterator[list[Worker]]:
    workers = workers_of(config)
    assert meet(workers) == [STORE_PORT] * 3
    yield workers
    for worker in workers:
        worker.peers.close()


def test_those_that_meet_have_one_name_and_those_that_meet_again_another(
    met: list[Worker], config: RunnerConfig
) -> None:
    names = {worker.peers.group for worker in met}
    again = workers_of(config)
    meet(again)
    names |= {worker.peers.group for worker in again}
    for worker in again:
        worker.peers.close()
    assert len(names) == 2 and all(names)


def test_what_one_cannot_go_on_for_all_hear(met: list[Worker]) -> None:
    met[1].peers.tell_lost("rank 0 was killed by signal 9")
    for other in (met[0], met[2]):
        assert other.lost.get(timeout=WAIT) == "data-parallel rank 1 is lost: rank 0 was killed by signal 9"
    for worker in met:
        worker.peers.close()
    assert all(worker.lost.empty() for worker in met), "the first reason counts, and one's own end is no news"


def test_a_worker_that_is_gone_is_noticed(met: list[Worker]) -> None:
    met[2].peers.close()
    assert met[0].lost.get(timeout=WAIT) == "data-parallel rank 2 is gone"
    met[0].peers.tell_lost("data-parallel rank 2 is gone")
    assert met[1].lost.get(timeout=WAIT) == "data-parallel rank 0 is lost: data-parallel rank 2 is gone"


def test_all_hear_that_one_is_to_stop(met: list[Worker]) -> None:
    met[1].peers.tell_stopping()
    assert met[0].stops.get(timeout=WAIT) and met[2].stops.get(timeout=WAIT)
    for other in (met[0], met[2]):
        other.peers.tell_stopping()
    time.sleep(0.05)
    assert met[1].stops.empty(), "it knows"


def test_of_those_who_are_lost_nobody_hears_that_they_stop(met: list[Worker]) -> None:
    met[1].peers.tell_lost("its rank is gone")
    met[1].peers.tell_stopping()
    for other in (met[0], met[2]):
        other.lost.get(timeout=WAIT)
        other.peers.tell_stopping()
    time.sleep(0.05)
    assert all(worker.stops.empty() for worker in met)


def test_the_ends_of_others_are_expected_while_one_ends_itself(met: list[Worker]) -> None:
    for worker in met[:2]:
        worker.peers.expect_end()
    met[2].peers.close()
    time.sleep(0.05)
    assert met[0].lost.empty() and met[1].lost.empty()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dtype": "bfloat16"}, "its dtype is bfloat16, that of data-parallel rank 0 is auto"),
        ({"dp_size": 4}, "its dp_size is 4, that of data-parallel rank 0 is 3"),
        ({"tensor_parallel_size": 2}, "its tensor_parallel_size is 2, that of data-parallel rank 0 is 1"),
        ({"load_format": "auto"}, "its load_format is auto, that of data-parallel rank 0 is dummy"),
        ({"dp_rank": 3}, "data-parallel rank 3 is not missing"),
    ],
)
def test_one_that_does_not_fit_is_told_why(config: RunnerConfig, change: dict[str, object], complaint: str) -> None:
    assert meeting_rank_0(config, change) == f"data-parallel rank 0 at {HOST} refuses this worker: {complaint}"


def test_another_model_does_not_fit(config: RunnerConfig, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", max_model_len=128)
    assert "this worker: its model fingerprint is " in meeting_rank_0(config, {"model": str(other)})


def test_who_does_not_know_the_secret_is_refused(config: RunnerConfig) -> None:
    assert "refuses the secret" in meeting_rank_0(config, {}, b"another secret of ranks")


@pytest.mark.parametrize("other", [1, 2])
def test_those_who_do_not_come_are_named(config: RunnerConfig, other: int) -> None:
    """All who came are told, whether the missing one is before or after them."""
    workers = workers_of(config)
    timed_out, refused = meet([workers[0], workers[other]], seconds=0.5)
    assert isinstance(timed_out, ExecutorTimeoutError) and isinstance(refused, ExecutorStartError)
    assert str(timed_out) == f"data-parallel ranks that have not joined in time: {3 - other}"
    assert str(refused).endswith(f"refuses this worker: data-parallel ranks that have not joined in time: {3 - other}")


def test_rank_0_that_does_not_come_is_named(config: RunnerConfig) -> None:
    _, worker, _ = workers_of(config)
    worker.meet(0.1)
    where = f"{HOST}:{worker.settings.port}"
    assert str(worker.outcome) == f"data-parallel rank 0 did not wait for others in time, at {where}"


def test_a_model_that_is_not_there_is_named(config: RunnerConfig) -> None:
    host, *_ = workers_of(replace(config, model="/no/such/model"))
    host.meet(0.1)
    assert isinstance(host.outcome, ExecutorStartError) and "no model '/no/such/model'" in str(host.outcome)


def test_experts_over_several_workers_need_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(WorkerSettings, ["--expert-parallel", "--dp-size", "2"], "worker")
    assert "--expert-parallel with --dp-size above 1 needs a --ranks-secret" in capsys.readouterr().err


def test_workers_without_shared_experts_step_alone() -> None:
    settings = WorkerSettings(dp_rank=1, dp_size=2)
    assert settings.peers() is None
    assert (settings.runner_config().dp_rank, settings.runner_config().dp_size) == (0, 1)
