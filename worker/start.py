"""A worker's process, from its flags to its exit status."""

import asyncio
import sys

from common.config import EXIT_USAGE, parse_settings, warn_of_unknown_variables
from common.event_loop import EventLoop
from common.garbage import imports_that_stay
from common.logging import setup_logging
from fissile.errors import FissileError
from worker.config import WorkerSettings
from worker.core.errors import ConfigError
from worker.errors import WorkerFailedError
from worker.executor.errors import ExecutorError
from worker.executor.local import LocalRanks
from worker.executor.rank_process import RankProcess
from worker.loader.errors import ModelError
from worker.start_checks import check_start

EXIT_FAILURE = 1


def start(first: RankProcess) -> None:
    """Serve until a signal comes. `first` becomes rank 0. Raises SystemExit when it cannot."""
    settings = parse_settings(WorkerSettings, sys.argv[1:], "worker")
    setup_logging(settings.log_level, settings.log_format)
    warn_of_unknown_variables(WorkerSettings)
    try:
        check_start(settings)
        with LocalRanks(settings.runner_config(), settings.remote(), settings.peers(), first) as local:
            _serve(settings, local)
    except (ConfigError, ExecutorError, FissileError, ModelError, OSError, WorkerFailedError) as error:
        print(f"worker: {str(error).splitlines()[0]}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE) from error


def _serve(settings: WorkerSettings, local: LocalRanks) -> None:
    # Only now: the ranks' processes import meanwhile, which takes longer.
    with imports_that_stay():
        from worker.serving import serve

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(serve(settings, local))
