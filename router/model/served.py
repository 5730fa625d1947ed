"""A model that is served, as its workers describe it."""

from dataclasses import dataclass

from fissile.v1 import GetWorkerResponse
from router.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """While some worker has it, or had it last."""

    id: str
    info: GetWorkerResponse
    tokenizer: Tokenizer
    num_workers: int
    """Available now."""
    aliases: tuple[str, ...] = ()
    """Other names for it; none is the id of another model."""
