"""A model that is served, as its workers describe it.

Workers of one model may differ, while it is replaced by its successor or on hosts of several kinds. Those that are
alike in all that a request can notice are a version of the model.
"""

from dataclasses import dataclass

from fissile.v1 import GetWorkerResponse
from router.model.tokenizer import Tokenizer

_NOTICED_CAPABILITIES = frozenset({"beam_search"})
"""What requests ask for; others are the workers' own affair."""


@dataclass(frozen=True, slots=True)
class Version:
    """By what workers of one model are told apart."""

    name: str
    """What its operator calls it; may be empty."""
    tokenizer_fingerprint: str
    """With the chat template."""
    model_fingerprint: str
    dtype: str
    max_model_len: int
    vocab_size: int
    capabilities: frozenset[str]

    @classmethod
    def of(cls, info: GetWorkerResponse) -> "Version":
        return cls(
            name=info.model_version,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            model_fingerprint=info.model_fingerprint,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            capabilities=_NOTICED_CAPABILITIES & set(info.capabilities),
        )

    def reads_like(self, other: "Version") -> bool:
        """A prompt that was made for `other` says the same here."""
        return (self.tokenizer_fingerprint, self.vocab_size) == (other.tokenizer_fingerprint, other.vocab_size)

    def continues(self, other: "Version") -> bool:
        """A completion that began on `other` goes on here token for token."""
        is_same_model = (self.model_fingerprint, self.dtype) == (other.model_fingerprint, other.dtype)
        return is_same_model and self.reads_like(other)


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version that some worker has, or had last."""

    model: str
    """Id."""
    version: Version
    info: GetWorkerResponse
    """Of one of its workers."""
    tokenizer: Tokenizer
    num_workers: int
    """Available now."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    id: str
    versions: tuple[ServedVersion, ...]
    """Those that have a worker now or, if none has, all. The one with the most workers comes first."""
    absent: tuple[ServedVersion, ...] = ()
    """The others: their workers are known, and away or drained."""
    aliases: tuple[str, ...] = ()
    """Other names for it; none is the id of another model."""

    @property
    def main(self) -> ServedVersion:
        """Speaks for the model where no version is chosen."""
        return self.versions[0]

    @property
    def max_model_len(self) -> int:
        """Of the version with the longest context."""
        return max(version.info.max_model_len for version in self.versions)

    @property
    def num_workers(self) -> int:
        """Available now."""
        return sum(version.num_workers for version in self.versions)
