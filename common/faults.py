"""What stands in the log of faults of ours, without what the exceptions say (that may be a client's own words, or a
secret), and of what others wrote."""

import logging

MAX_SHOWN = 128
"""Characters of others' words in a line."""


class Unsaid(Exception):
    """Stands for an exception, with its traceback; says what kind it was."""


def log_fault(logger: logging.Logger, error: BaseException, message: str, *args: object) -> None:
    """As an error, with the traceback of `error` and of what caused it."""
    stand_in = _stand_in(error)
    logger.error(message, *args, exc_info=(Unsaid, stand_in, stand_in.__traceback__))


def _stand_in(error: BaseException) -> Unsaid:
    result = first = Unsaid(type(error).__qualname__).with_traceback(error.__traceback__)
    seen = {id(error)}
    while (cause := error.__cause__ or error.__context__) and id(cause) not in seen:
        seen.add(id(cause))
        result.__cause__ = Unsaid(type(cause).__qualname__).with_traceback(cause.__traceback__)
        error, result = cause, result.__cause__
    return first


def shown(text: str) -> str:
    """The words of a client or a worker, fit for a line: a request that is refused may hold anything."""
    cut = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
    return cut if cut.isprintable() else ascii(cut)
