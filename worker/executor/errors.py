"""How an executor fails."""


class ExecutorError(Exception):
    """The executor cannot go on; shut it down."""


class ExecutorDiedError(ExecutorError):
    """A rank ended or failed. The message has what is known of its end: exit code, the end of its standard error."""


class ExecutorStartError(ExecutorError):
    """The model cannot be served as configured; the message is for the user."""


class ExecutorTimeoutError(ExecutorError):
    """The ranks live, but did not answer in time."""
