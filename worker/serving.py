"""A worker's process, from its start to a signal or its failure."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from common.signals import stop_event_on_signals
from worker.config import WorkerSettings
from worker.engine.garbage import leave_to_engine
from worker.executor.executor import Executor
from worker.executor.local import LocalRanks
from worker.face.served_files import files_reader
from worker.server import WorkerServer


async def run_until_stopped(server: WorkerServer, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Serve until `stop` is set. Raises what kept it from starting, or WorkerFailedError."""
    try:
        await server.listen()
        await _load_and_wait(server, stop, on_ready)
    finally:
        await server.stop()
    if server.failure is not None:
        raise server.failure


async def _load_and_wait(server: WorkerServer, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Until `stop` is set or the worker fails, while it loads or later."""
    stopping, failing = asyncio.create_task(stop.wait()), asyncio.create_task(server.failed.wait())
    loading = asyncio.create_task(server.load())
    try:
        await asyncio.wait({stopping, failing, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            on_ready()
            await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (stopping, failing, loading):
            task.cancel()


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """From another thread."""
    with suppress(RuntimeError):  # the loop has been closed
        loop.call_soon_threadsafe(event.set)


async def serve(settings: WorkerSettings, local: LocalRanks) -> None:
    """Until a signal comes. `local`: the ranks of this host, whose processes run already."""
    read_files = files_reader(settings)
    stop, loop = stop_event_on_signals(), asyncio.get_running_loop()
    server = WorkerServer(
        settings,
        lambda on_rank_end: Executor(
            settings.runner_config(),
            local=local,
            remote=settings.remote(),
            peers=settings.peers(),
            log_level=settings.log_level,
            log_format=settings.log_format,
            on_rank_end=on_rank_end,
            on_peer_stop=lambda: _set_soon(loop, stop),
        ),
        read_files,
    )
    await run_until_stopped(server, stop, on_ready=leave_to_engine)
