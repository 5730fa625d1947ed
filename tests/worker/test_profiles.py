"""Profiles of all ranks: which states refuse what, and what comes of ranks that fail."""

import os
import pickle
import re
import threading
from pathlib import Path

import pytest

from fissile.errors import FailedPreconditionError, InternalError, InvalidArgumentError
from worker.executor import profiles as module
from worker.executor.errors import ExecutorDiedError, ExecutorTimeoutError
from worker.executor.profiles import Profiles
from worker.runner.messages import ProfileDone, StartProfile, StopProfile


class FakeLink:
    """To a rank that answers at once, with `error`; or not, while `answers` is not set."""

    def __init__(self, profiles: Profiles, rank: int) -> None:
        self._profiles, self._rank = profiles, rank
        self.told: list[StartProfile | StopProfile] = []
        self.error: str | None = None
        self.answers = True

    def send(self, message: bytes) -> None:
        self.told.append(pickle.loads(message))
        if self.answers:
            self._profiles.settle(self._rank, ProfileDone(self.told[-1].number, self.error))


@pytest.fixture
def profiles():
    return Profiles()


@pytest.fixture
def links(profiles):
    made = [FakeLink(profiles, rank) for rank in range(2)]
    profiles.attach(made)
    return made


def test_each_rank_has_a_trace_of_its_own_and_the_answer_is_that_of_rank_0(profiles, links, tmp_path):
    profiles.start(str(tmp_path))
    stem = f"{tmp_path}/trace-{os.getpid()}-0"
    assert [link.told for link in links] == [[StartProfile(1, f"{stem}-rank{rank}.json")] for rank in range(2)]
    assert profiles.stop() == f"{stem}-rank0.json"
    assert [link.told[1:] for link in links] == [[StopProfile(2)]] * 2


def test_without_a_folder_there_is_a_new_one(profiles, links, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    profiles.start("")
    assert re.fullmatch(rf"{tmp_path}/fissile-profile-\w+/trace-\d+-0-rank0\.json", profiles.stop())


def test_traces_of_one_folder_have_names_of_their_own(profiles, links, tmp_path):
    paths = set()
    for _ in range(2):
        profiles.start(str(tmp_path))
        paths.add(profiles.stop())
    assert len(paths) == 2


def test_only_one_runs_at_a_time(profiles, links, tmp_path):
    with pytest.raises(FailedPreconditionError, match="no profile runs"):
        profiles.stop()
    profiles.start(str(tmp_path))
    with pytest.raises(FailedPreconditionError, match="runs already"):
        profiles.start(str(tmp_path))
    profiles.stop()
    with pytest.raises(FailedPreconditionError, match="no profile runs"):
        profiles.stop()


def test_what_comes_while_ranks_are_waited_for_is_refused(profiles, links, tmp_path):
    links[1].answers = False
    starting = threading.Thread(target=profiles.start, args=(str(tmp_path),))
    starting.start()
    while not links[1].told:
        pass
    with pytest.raises(FailedPreconditionError, match="being started or stopped"):
        profiles.stop()
    profiles.settle(1, ProfileDone(1, None))
    starting.join()
    links[1].answers = True
    profiles.stop()


@pytest.mark.parametrize("folder", ["/proc/no/such", "/dev/null/x"])
def test_a_folder_that_cannot_be_made_is_named(profiles, links, folder):
    with pytest.raises(InvalidArgumentError, match=r"^output_dir: it cannot be made"):
        profiles.start(folder)
    assert links[0].told == []


def test_a_folder_that_is_no_path_is_named(profiles, links):
    with pytest.raises(InvalidArgumentError, match=r"^output_dir: it is no path: embedded null byte"):
        profiles.start("/tmp/a\0b")
    assert links[0].told == []


def test_a_rank_that_cannot_start_ends_the_profile_of_the_others(profiles, links, tmp_path):
    links[1].error = "no profiler"
    with pytest.raises(InternalError, match=r"^rank 1: no profiler$"):
        profiles.start(str(tmp_path))
    assert [type(message) for message in links[0].told] == [StartProfile, StopProfile]
    links[1].error = None
    profiles.start(str(tmp_path))


def test_a_trace_that_cannot_be_written_is_an_error_and_the_next_profile_works(profiles, links, tmp_path):
    profiles.start(str(tmp_path))
    links[0].error = "disk full"
    with pytest.raises(InternalError, match=r"^rank 0: disk full$"):
        profiles.stop()
    links[0].error = None
    profiles.start(str(tmp_path))
    assert Path(profiles.stop()).parent == tmp_path


def test_a_rank_that_ends_fails_who_waits(profiles, links, tmp_path):
    links[1].answers = False
    profiles.fail()
    with pytest.raises(ExecutorDiedError):
        profiles.start(str(tmp_path))


def test_an_answer_that_comes_too_late_is_not_taken_for_another(profiles, links, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PROFILE_SECONDS", 0.01)
    links[1].answers = False
    with pytest.raises(ExecutorTimeoutError):
        profiles.start(str(tmp_path))
    profiles.settle(1, ProfileDone(1, "too late"))
    links[1].answers = True
    profiles.start(str(tmp_path))
    profiles.stop()
