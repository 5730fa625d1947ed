"""Faults of ours in the log, without what the exceptions say: that may be a client's own words, or a secret."""

import logging


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
