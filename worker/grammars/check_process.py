"""A disposable process that compiles grammars before rank 0 does: `python -m worker.grammars.check_process <request fd>
<reply fd>`, by `worker.grammars.checks`.

The library recurses over what a client wrote, and bounds neither time nor memory in all it does. Here that is at worst
the end of this process: its stack is smaller than a rank's, and the system ends it when a grammar takes more processor
time or memory than the limits below. What compiles here compiles there.
"""

import os
import random
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from llguidance import LLMatcher

from fissile.parent import EXIT_ORPHANED, die_with_parent
from worker.grammars.check_messages import Check, Checked, CheckFailed, CheckSetup
from worker.grammars.compiler import STACK_BYTES, GrammarCompiler, error_of
from worker.grammars.errors import GrammarError
from worker.loader.source import resolve_model
from worker.loader.tokenizer import load_tokenizer_files
from worker.processes.messages import receive, send

STACK_SHARE = 4
"""Of a rank's stack there is one part in so many."""
CPU_SECONDS = 1.0
"""Of processor time for a grammar."""
EXTRA_BYTES = 512 * 1024 * 1024
"""Of address space, on top of what the tokenizer takes."""
NUM_TRIAL_TOKENS = 16
MAX_MASK_SECONDS = 0.1
"""Of processor time for one mask: a step of the model waits for the masks of its rows."""


def main() -> None:
    requests = Connection(int(sys.argv[1]), writable=False)
    replies = Connection(int(sys.argv[2]), readable=False)
    setup: CheckSetup = receive(requests)
    # Ctrl-C reaches the whole process group; the worker decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(setup.parent_pid)
    try:
        compiler = GrammarCompiler(
            lambda: load_tokenizer_files(resolve_model(setup.model)).files["tokenizer.json"],
            setup.vocab_size,
            setup.eos_token_ids,
            STACK_BYTES // STACK_SHARE,
        )
        _limit_memory(compiler)
    except Exception:
        send(replies, CheckFailed(traceback.format_exc()))
        sys.exit(1)
    try:
        while True:
            message: Check = receive(requests)
            send(replies, Checked(_check(compiler, message)))
    except (EOFError, OSError):
        os._exit(EXIT_ORPHANED)


def _limit_memory(compiler: GrammarCompiler) -> None:
    with suppress(GrammarError):  # each grammar will say so
        compiler.tokenizer()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return  # no other system counts address space
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + STACK_BYTES // STACK_SHARE + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _check(compiler: GrammarCompiler, message: Check) -> str | None:
    """What is wrong with the grammar. SIGPROF ends the process when its time is over."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        _try(compiler.build(message.grammar))
    except GrammarError as error:
        return str(error)
    except MemoryError:
        return "it takes too much memory to compile"
    except Exception:
        traceback.print_exc()
        return "it cannot be compiled"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def _try(matcher: LLMatcher) -> None:
    """Write a short text that the grammar allows: whether finding what may come takes too long shows only there."""
    choice = random.Random(0)
    for _ in range(NUM_TRIAL_TOKENS):
        started = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if time.thread_time() - started > MAX_MASK_SECONDS:
            raise GrammarError("finding which tokens it allows takes too long")
        if matcher.is_error():
            raise GrammarError(error_of(matcher))
        position = choice.randrange(mask.bit_length())
        allowed = mask >> position
        matcher.consume_token(position + (allowed & -allowed).bit_length() - 1)
        if matcher.is_stopped():
            return


if __name__ == "__main__":
    main()
