"""The process of a rank: `python -m worker.runner.process <request fd> <reply fd> <parent pid>`, by the executor on the
same host.

It is bound to the executor's process before it imports what takes seconds, and imports that before it is told what to
run: the executor may not know yet.
"""

import logging
import signal
import sys
from multiprocessing.connection import Connection

from common.garbage import imports_that_stay
from common.logging import setup_logging
from fissile.parent import die_with_parent
from worker.processes.messages import receive
from worker.runner.messages import Place, Setup


def main() -> None:
    requests = Connection(int(sys.argv[1]), writable=False)
    replies = Connection(int(sys.argv[2]), readable=False)
    # Ctrl-C reaches the whole process group; the worker decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(int(sys.argv[3]))
    with imports_that_stay():
        from worker.runner.rank import serve_rank
    place: Place = receive(requests)
    setup: Setup = receive(requests)
    setup_logging(setup.log_level, setup.log_format)  # type: ignore[arg-type]
    if setup.log_level != "debug":
        logging.getLogger("torch").setLevel(logging.WARNING)  # at its end it counts what its caches held
    serve_rank(requests, replies, setup, place)


if __name__ == "__main__":
    main()
