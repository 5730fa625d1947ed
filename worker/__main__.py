"""`python -m worker`."""

import asyncio
import sys

from common.config import EXIT_USAGE, parse_settings
from common.event_loop import EventLoop
from common.logging import setup_logging
from fissile.errors import FissileError
from worker.config import WorkerSettings
from worker.core.errors import ConfigError
from worker.executor.errors import ExecutorError
from worker.loader.errors import ModelError
from worker.server import WorkerFailedError
from worker.serving import serve

EXIT_FAILURE = 1


def main() -> None:
    settings = parse_settings(WorkerSettings, sys.argv[1:], "worker")
    setup_logging(settings.log_level, settings.log_format)
    try:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(serve(settings))
    except (ConfigError, ExecutorError, FissileError, ModelError, OSError, WorkerFailedError) as error:
        print(f"worker: {str(error).splitlines()[0]}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE) from error


if __name__ == "__main__":
    main()
