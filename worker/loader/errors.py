"""What can be wrong with a model. Each message says what to do about it; start-up prints it as one line."""


class ModelError(Exception):
    """Base of everything that keeps a model from being loaded."""


class ModelNotFoundError(ModelError):
    """The name leads to no files."""


class ModelConfigError(ModelError):
    """The model's configuration is missing, malformed or asks for something this engine does not do."""


class UnknownArchitectureError(ModelConfigError):
    """The architecture has no implementation here."""


class WeightsError(ModelError):
    """Tensors are missing, unexpected, of the wrong shape, their file is damaged, or they are larger than memory."""
