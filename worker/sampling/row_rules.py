"""What the host knows of the rows that are sampled together: which operations a step needs, and with what lists."""

from dataclasses import dataclass

from torch import Tensor

from worker.kernels.sampling import DrawRules

NO_TOKEN = -1
"""In `BadTokens.beginnings`: a place that matches anything."""


@dataclass(frozen=True, slots=True)
class Places:
    """Elements of the edited logits [R, V], as indices into the flat tensor: row × V + token. int64 [E]."""

    flat: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class BadTokens:
    """For each bad sequence of each row: the token that would complete it, and the tokens before that."""

    places: Places
    """[B]: the last token."""
    beginnings: Tensor
    """int32 [B, most]: the tokens before it, at the right end; NO_TOKEN in front."""
    lengths: Tensor
    """int64 [B]: tokens of the whole."""


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes of single logits before a token is chosen, R rows being edited. None: no row asks for that."""

    bias: tuple[Places, Tensor] | None
    """Places and what is added there, float32 [E]."""
    penalised: Tensor | None
    """int64 [P]: rows with penalties."""
    has_repetition: bool
    has_output_penalties: bool
    """Presence or frequency."""
    early: tuple[Places, Tensor] | None
    """Ending tokens, and the position from which each may come, int64 [E]."""
    bad: BadTokens | None


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows whose log probabilities are asked for."""

    rows: Tensor | None
    """int64; None for all rows."""
    indices: list[int]
    """The same on the host."""
    numbers: list[int]
    """Of each: how many most likely tokens."""

    @property
    def most(self) -> int:
        return max(self.numbers)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Some of the sampled rows, whose tokens are chosen together."""

    rows: Tensor | None
    """int64: which they are; None for all."""
    num_rows: int
    draws: DrawRules


@dataclass(frozen=True, slots=True)
class EditedRows:
    """Rows whose logits change before a token is chosen."""

    group: RowGroup
    edits: LogitEdits
    """Its rows are counted within the group."""
    is_restricted: bool
    """Some have a list of allowed or banned tokens."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """Each sampled row is in one of the two groups."""

    num_rows: int
    plain: RowGroup | None
    """Rows whose token is chosen from the model's own logits."""
    edited: EditedRows | None
    logprobs: LogprobRows | None

    @property
    def is_greedy(self) -> bool:
        """Every token is the most likely one, and nothing else is asked for."""
        return (
            self.plain is not None and self.edited is None and self.logprobs is None and not self.plain.draws.num_drawn
        )
