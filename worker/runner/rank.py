"""The process of one tensor-parallel rank: `python -m worker.runner.rank <request fd> <reply fd>`, by the executor.

Three threads: one drains the request pipe, so that the executor never waits to send; the main one runs steps; one waits
for results and sends them. The request pipe breaks when the executor's process ends in any way; the rank ends with it.
"""

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch
import torch.distributed as dist

from common.logging import setup_logging
from worker.core.batch import ScheduledBatch
from worker.kernels.registry import KernelBackendError
from worker.layers.parallel import TensorParallel
from worker.loader.errors import ModelError
from worker.runner.build import build_runner, resolve_device
from worker.runner.memory import CacheMemoryError, physical_cores
from worker.runner.messages import Failed, Ready, Setup, StepDone, Stop, receive, send
from worker.runner.model_runner import ModelRunner
from worker.runner.pending import PendingStep

PR_SET_PDEATHSIG = 1
EXIT_FAILED, EXIT_ORPHANED = 1, 3
USER_ERRORS = (ModelError, KernelBackendError, CacheMemoryError, ValueError)

logger = logging.getLogger("worker.runner.rank")


def main() -> None:
    requests = Connection(int(sys.argv[1]), writable=False)
    replies = Connection(int(sys.argv[2]), readable=False)
    setup: Setup = receive(requests)
    faulthandler.enable()
    # Ctrl-C reaches the whole process group; the worker decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(setup.parent_pid)
    setup_logging(setup.log_level, setup.log_format)  # type: ignore[arg-type]
    queue: SimpleQueue[ScheduledBatch | Stop] = SimpleQueue()
    threading.Thread(target=_drain, args=(requests, queue), name="requests", daemon=True).start()
    try:
        runner = _start(setup, replies)
    except USER_ERRORS as error:
        logger.debug("start-up failed", exc_info=True)
        send(replies, Failed(str(error), expected=True))
        sys.exit(EXIT_FAILED)
    except Exception:
        send(replies, Failed(traceback.format_exc(), expected=False))
        sys.exit(EXIT_FAILED)
    _run(runner, queue, replies, answers=setup.rank == 0)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; at once if that has happened."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(EXIT_ORPHANED)


def _drain(requests: Connection, queue: "SimpleQueue[ScheduledBatch | Stop]") -> None:
    try:
        while True:
            message = receive(requests)
            queue.put(message)
            if isinstance(message, Stop):
                return
    except (EOFError, OSError):
        os._exit(EXIT_ORPHANED)


def _start(setup: Setup, replies: Connection) -> ModelRunner:
    config = setup.config
    size = config.tensor_parallel_size
    torch.set_num_threads(config.num_threads or max(1, physical_cores() // size))
    if size > 1:
        backend = "gloo" if resolve_device(config.device, setup.rank).type == "cpu" else "nccl"
        store = dist.FileStore(setup.rendezvous, size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=setup.rank, world_size=size)
    runner, info = build_runner(config, TensorParallel(setup.rank, size))
    logger.info("rank %d is ready, %d CPU threads", setup.rank, torch.get_num_threads())
    send(replies, Ready(info))
    return runner


def _run(
    runner: ModelRunner, queue: "SimpleQueue[ScheduledBatch | Stop]", replies: Connection, *, answers: bool
) -> None:
    """Steps until `Stop`. A fault ends the process: what the device holds cannot be trusted any more."""
    pending: SimpleQueue[PendingStep | None] = SimpleQueue()
    sender = threading.Thread(target=_answer, args=(pending, replies, answers), name="replies")
    sender.start()
    while isinstance(batch := queue.get(), ScheduledBatch):
        try:
            pending.put(runner.submit(batch))
        except Exception:
            _fail(replies, f"step {batch.step} failed:\n{traceback.format_exc()}")
    pending.put(None)
    sender.join()
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(pending: "SimpleQueue[PendingStep | None]", replies: Connection, answers: bool) -> None:
    """Every rank waits for its steps, so that a fault of its device is noticed; rank 0 reports them."""
    while (step := pending.get()) is not None:
        try:
            output = step.result()
            if answers:
                send(replies, StepDone(output))
        except OSError:
            os._exit(EXIT_ORPHANED)
        except Exception:
            _fail(replies, f"step {step.batch.step} failed:\n{traceback.format_exc()}")


def _fail(replies: Connection, message: str) -> None:
    """Report, then end without clean-up: other threads may be stuck in the device."""
    try:
        send(replies, Failed(message, expected=False))
    finally:
        os._exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
