"""One tensor-parallel rank, in a process of its own (`process.py`, or `worker.join` for a worker of another host).

Threads: one drains what the executor sends, so that this never waits to send; the main one runs steps; where a device
works on, one waits for results and sends them; one says that the process goes on; on rank 0, one takes messages about
grammars, and two compile. What connects a rank to its executor breaks when the executor's process ends in any way; the
rank ends with it.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from typing import NoReturn

import torch
import torch.distributed as dist

from common.faults import log_fault
from common.garbage import freeze_loaded
from fissile.parent import EXIT_ORPHANED
from worker.core.batch import BatchOutput, ScheduledBatch
from worker.grammars.compiler import GrammarCompiler
from worker.grammars.errors import GrammarError
from worker.kernels.operation import KernelBackendError
from worker.kernels.step import Round
from worker.lap_watch import LapWatch, process_seconds
from worker.loader.errors import ModelError
from worker.processes.messages import Receiver, Sender, receive, send
from worker.runner.build import build_runner, resolve_device
from worker.runner.config import RunnerConfig
from worker.runner.lockstep import Alarm, Answered, Inbox, Lockstep, Turn, turns_alone
from worker.runner.meeting import Meeting, meet
from worker.runner.memory import CacheMemoryError, give_back_free_memory, physical_cores, share_one_heap
from worker.runner.messages import (
    PULSE_SECONDS,
    Compile,
    Compiled,
    Failed,
    Keep,
    Place,
    ProfileDone,
    Pulse,
    Ready,
    Release,
    Setup,
    StartProfile,
    Stop,
    StopProfile,
)
from worker.runner.model_runner import ModelRunner
from worker.runner.pending import PendingStep
from worker.runner.profiler import StepProfiler

EXIT_FAILED = 1
OTHERS_SECONDS = 1.0
"""For the worker to learn why another's rank is gone, and to end this one, before this one says what it saw of that."""
NUM_COMPILERS = 2
"""Threads that compile grammars: a slow one does not hold up the others."""
USER_ERRORS = (ModelError, KernelBackendError, CacheMemoryError, ValueError)

logger = logging.getLogger("worker.runner.rank")


def serve_rank(requests: Receiver, replies_to: Sender, setup: Setup, place: Place) -> None:
    """Build the rank and run what comes, until `Stop`. Ends the process when the executor is gone, or on a fault."""
    replies = Replies(replies_to)
    faulthandler.enable()
    steps: Inbox = SimpleQueue()
    grammars: SimpleQueue[Compile | Keep | Release] = SimpleQueue()
    threading.Thread(target=_drain, args=(requests, steps, grammars), name="requests", daemon=True).start()
    try:
        runner, meeting = _start(setup, place, replies)
    except USER_ERRORS as error:
        logger.debug("start-up failed", exc_info=True)
        if not place.is_local:
            logger.error("%s", error)  # the worker says so, too, but on another host
        replies.send(Failed(str(error), expected=True))
        sys.exit(EXIT_FAILED)
    except Exception as error:
        replies.send(Failed(f"start-up failed: {error}\n{traceback.format_exc()}", expected=False))
        sys.exit(EXIT_FAILED)
    if runner.grammars is not None:
        arguments = (runner.grammars.compiler, grammars, replies)
        threading.Thread(target=_serve_grammars, args=arguments, name="grammars", daemon=True).start()
    threading.Thread(target=_pulse, args=(replies,), name="pulse", daemon=True).start()
    _run(runner, _turns(setup.config, runner, meeting, steps, replies), steps, replies, answers=setup.rank == 0)


class Replies:
    """To the executor, from any thread."""

    def __init__(self, connection: Sender) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Ready | BatchOutput | Compiled | ProfileDone | Pulse | Failed) -> None:
        with self._lock:
            send(self._connection, message)


def _pulse(replies: Replies) -> None:
    """Until the executor is gone, which ends the process."""
    with suppress(OSError):
        while True:
            replies.send(Pulse())
            time.sleep(PULSE_SECONDS)


def _drain(
    requests: Receiver,
    steps: Inbox,
    grammars: "SimpleQueue[Compile | Keep | Release]",
) -> None:
    try:
        while True:
            message = receive(requests)
            if isinstance(message, Compile | Keep | Release):
                grammars.put(message)
                continue
            steps.put(message)
            if isinstance(message, Stop):
                return
    except (EOFError, OSError):
        logger.info("the executor is gone")
        os._exit(EXIT_ORPHANED)


def _serve_grammars(
    compiler: GrammarCompiler, messages: "SimpleQueue[Compile | Keep | Release]", replies: Replies
) -> None:
    """What was compiled stays with the compiler, where the slots find it."""
    compilers = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="compiler")
    while True:
        match messages.get():
            case Keep(grammar):
                compiler.keep(grammar)
            case Release(grammar):
                compiler.release(grammar)
            case Compile() as message:
                compilers.submit(_compile, compiler, message, replies)


def _compile(compiler: GrammarCompiler, message: Compile, replies: Replies) -> None:
    error = None
    try:
        compiler.compile(message.grammar)
    except GrammarError as raised:
        error = str(raised)
    except Exception as raised:
        # The text is a client's: whatever it does to the library, the rank lives on.
        log_fault(logger, raised, "compiling a grammar failed")
        error = "it cannot be compiled"
    try:
        replies.send(Compiled(message.key, error))
    except OSError:
        os._exit(EXIT_ORPHANED)


def _start(setup: Setup, place: Place, replies: Replies) -> tuple[ModelRunner, Meeting]:
    config, watch = setup.config, LapWatch()
    watch.lap("process and imports", process_seconds())
    torch.set_num_threads(config.num_threads or max(1, physical_cores() // place.num_local_ranks))
    device = resolve_device(config.device, place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        share_one_heap()
    meeting = meet(setup, place, device)
    watch.lap("meeting")
    groups = meeting.groups
    runner, info = build_runner(config, groups.tp, place.local_rank, watch, ep=groups.ep, dp=groups.dp)
    # What is loaded stays: the collector need not walk through it again and again.
    freeze_loaded()
    give_back_free_memory()
    num_threads = torch.get_num_threads()
    logger.info("rank %d is ready after %.1f s (%s), %d CPU threads", setup.rank, watch.seconds, watch, num_threads)
    replies.send(Ready(info))
    return runner, meeting


def _turns(
    config: RunnerConfig, runner: ModelRunner, meeting: Meeting, steps: Inbox, replies: Replies
) -> Iterator[Turn]:
    control = meeting.groups.control
    if control.size == 1:
        return turns_alone(steps)
    assert meeting.store is not None
    alarm = Alarm(meeting.store, control.rank, steps, lambda why: _fail_of_others(replies, why))
    return Lockstep(steps, control, config.tensor_parallel_size, alarm, runner.idle_batch).turns()


@torch.inference_mode()
def _run(runner: ModelRunner, turns: Iterator[Turn], steps: Inbox, replies: Replies, *, answers: bool) -> None:
    """A fault ends the process: what the device holds cannot be trusted any more."""
    answer = partial(_answer, steps=steps, replies=replies, answers=answers)
    # A thread that is woken for a step that is done takes the processor from the next one.
    with nullcontext(answer) if runner.is_done_at_submit else _thread_for(answer) as take:
        try:
            for turn in turns:
                if isinstance(turn.message, ScheduledBatch):
                    take(_step(runner, turn.message, turn.together, replies))
                else:
                    _profile(runner.profiler, turn.message, replies)
        except RuntimeError as error:  # of the collective before a step
            _fail_of_others(replies, str(error))
    runner.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _step(runner: ModelRunner, batch: ScheduledBatch, together: Round | None, replies: Replies) -> PendingStep:
    try:
        with runner.profiler.step(batch.step, len(batch.slots)):
            return runner.submit(batch, together)
    except Exception as error:
        if together is not None:
            time.sleep(OTHERS_SECONDS)
        _fail(replies, f"step {batch.step} failed: {error}\n{traceback.format_exc()}")


def _profile(profiler: StepProfiler, message: StartProfile | StopProfile, replies: Replies) -> None:
    if isinstance(message, StopProfile):
        profiler.stop(lambda error: replies.send(ProfileDone(message.number, error)))
        return
    error = None
    try:
        profiler.start(message.path)
    except Exception as raised:
        logger.exception("a profile cannot be started")
        error = str(raised)
    replies.send(ProfileDone(message.number, error))


@contextmanager
def _thread_for(answer: Callable[[PendingStep], None]) -> Iterator[Callable[[PendingStep], None]]:
    """What takes steps to be answered by a thread, in their order; all are when the context ends."""
    pending: SimpleQueue[PendingStep | None] = SimpleQueue()

    def run() -> None:
        while (step := pending.get()) is not None:
            answer(step)

    thread = threading.Thread(target=run, name="replies")
    thread.start()
    yield pending.put
    pending.put(None)
    thread.join()


def _answer(step: PendingStep, steps: Inbox, replies: Replies, answers: bool) -> None:
    """Every rank waits for its steps, so that a fault of its device is noticed; rank 0 reports them."""
    try:
        output = step.result()
        if step.batch.is_dummy:
            return
        if answers:
            replies.send(output)
        steps.put(Answered())
    except OSError:
        os._exit(EXIT_ORPHANED)
    except Exception as error:
        _fail(replies, f"step {step.batch.step} failed: {error}\n{traceback.format_exc()}")


def _fail_of_others(replies: Replies, why: str) -> NoReturn:
    time.sleep(OTHERS_SECONDS)
    _fail(replies, f"the ranks that it steps together with are gone: {why}")


def _fail(replies: Replies, message: str) -> NoReturn:
    """Report, then end without clean-up: other threads may be stuck in the device."""
    try:
        replies.send(Failed(message, expected=False))
    finally:
        os._exit(EXIT_FAILED)
