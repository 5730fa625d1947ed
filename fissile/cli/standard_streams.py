"""Standard input, output and error, which who starts a command may have closed or given an encoding of old."""

import io
import os
import sys

_NAMES = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def make_usable() -> None:
    """One that is closed is empty, or takes everything: else the next file or socket that is opened would have its
    number, and get what libraries print there, here and in a service that takes this process's place. Characters that
    an encoding does not have are `?`."""
    for number, (name, mode) in enumerate(_NAMES):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def give_up_unwritten() -> None:
    """What cannot be written to standard output: else Python tries once more at its end, and exits with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
