"""What a client asks of one sequence: how to sample and when to stop. Immutable, shared by engine and runner."""

import enum
from dataclasses import dataclass, field

from worker.core.stop_sequences import StopSequences


class GrammarKind(enum.Enum):
    """What language a grammar's text is written in."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    """Any JSON object; the text is empty."""
    REGEX = "regex"
    EBNF = "grammar"
    """Lark syntax."""
    CHOICE = "choice"
    """The text is a JSON array of strings."""
    COMPOSITE = "composite"
    """The text is a JSON array: a grammar in Lark syntax, in which `@name` stands for another grammar, and an object of
    [kind, text] by name."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output must match."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. Values are already validated; `seed` is always resolved (never "unset").

    The draw is keyed by (seed, position of the new token in the sequence), never by step or batch, so a sequence gives
    the same tokens alone or in a batch, before or after preemption, and on another worker.
    """

    temperature: float = 1.0
    """Below 1e-5 means greedy."""
    top_k: int = 0
    """0 means all of the vocabulary."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Unsigned 64 bit."""

    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token generated so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token as many times as it was generated."""
    repetition_penalty: float = 1.0
    """Divides (where positive) or multiplies the logits of the tokens of prompt and output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each token once."""
    allowed_token_ids: tuple[int, ...] = ()
    """When not empty, nothing else is generated."""
    banned_token_ids: tuple[int, ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    """Each non-empty. Never completed, be it begun in the prompt."""
    grammar: Grammar | None = None

    num_logprobs: int | None = None
    """Log probabilities of the chosen token and of this many most likely ones; None: none at all."""
    num_prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """When a sequence ends. Token ids only: stop strings are the router's."""

    max_tokens: int | None
    """Most tokens to generate, at least 1; None: what context and cache leave. Those of an earlier worker count."""
    min_tokens: int = 0
    """EOS and stop tokens do not end the sequence before this many generated tokens."""
    eos_token_ids: frozenset[int] = frozenset()
    """The model's end-of-sequence ids; empty when the request ignores EOS."""
    stop_token_ids: frozenset[int] = frozenset()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    """Each non-empty. Matched against generated tokens only, never across the end of the prompt."""
    stop_sequences: StopSequences = field(init=False, repr=False, compare=False)
    """The same, ready to be matched."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_sequences", StopSequences(self.stop_token_sequences))


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Beam search as `transformers` defines it: 2 × width candidates a step, hypotheses by normalised score."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False
