"""While each hostile request runs, eight ordinary streams go on as if nothing happened, and no service grows.

A new hostile request is a row of `hostile.HOSTILE`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fissile.cli.cluster import Cluster
from tests.e2e.hostile import HOSTILE, Attack
from tests.e2e.neighbours import Neighbours, Seen

MAX_GAP_SECONDS = 1.0
GAP_FACTOR = 4.0
"""On a machine that is busy otherwise, gaps are long without anybody's fault: so many times those of the calm run are
allowed, too."""
MAX_GROWTH = 512 * 1024 * 1024


@pytest.fixture(scope="module")
def neighbours(cluster: Cluster) -> Iterator[Neighbours]:
    with Neighbours(cluster.router_address) as started:
        yield started


@pytest.fixture(scope="module")
def calm(neighbours: Neighbours) -> Seen:
    neighbours.start()
    return neighbours.stop()


class Memory:
    """Of all processes of both services: the peak of each above what it has now. New processes count in whole."""

    def __init__(self, cluster: Cluster) -> None:
        self._services = [psutil.Process(child.pid) for child in (cluster.router, *cluster.workers)]
        self._before = {process.pid: process.memory_info().rss for process in self._processes()}
        for pid in self._before:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew

    def growth(self) -> int:
        return max(_peak(process.pid) - self._before.get(process.pid, 0) for process in self._processes())

    def _processes(self) -> list[psutil.Process]:
        return [process for service in self._services for process in (service, *service.children(recursive=True))]


def _peak(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("attack", HOSTILE, ids=lambda attack: attack.__name__)
def test_neighbours_notice_nothing(
    cluster: Cluster, neighbours: Neighbours, calm: Seen, idle: Callable[[], None], attack: Attack
) -> None:
    assert not calm.faults and calm.num_rounds == 1
    memory = Memory(cluster)
    neighbours.start()
    try:
        attack(cluster)
    finally:
        seen = neighbours.stop()
    growth = memory.growth()
    assert not seen.faults
    assert seen.tokens == calm.tokens
    assert seen.longest_gap < max(MAX_GAP_SECONDS, GAP_FACTOR * calm.longest_gap)
    assert growth < MAX_GROWTH
    assert all(child.exit_code is None for child in (cluster.router, *cluster.workers))
    idle()
