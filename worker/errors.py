"""Errors of a worker as a whole."""


class WorkerFailedError(Exception):
    """The engine or the device's processes failed; the log has the details."""
