"""What a worker takes of the machine's memory."""

import psutil

from fissile.cli.cluster import Cluster

GIB = 1 << 30
CACHE = 0.5 * GIB
"""That of `WORKER_ARGUMENTS`, which other tests may have used up."""


def test_a_worker_holds_its_weights_once(cluster: Cluster) -> None:
    """540 MB in float32 with the tied table; torch and two processes are most of the rest."""
    for worker in cluster.workers:
        process = psutil.Process(worker.pid)
        used = sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
        assert used < 1.0 * GIB + CACHE, f"{used / GIB:.2f} GiB"
