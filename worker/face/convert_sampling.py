"""SamplingParams of the contract → those of the core. A worker does not trust routers: everything is checked again."""

import json
from collections.abc import Sequence

from common import bounds
from fissile import v1
from fissile.errors import InvalidArgumentError
from worker.core.params import Grammar, GrammarKind, SamplingParams
from worker.face.requirements import check_token_ids, require, require_at_most, require_in, require_length

_DEFAULTS = SamplingParams()


def sampling_from_pb(message: v1.SamplingParams, vocab_size: int) -> SamplingParams:
    """Raises InvalidArgumentError naming the field. The seed is not among them: each sequence of a group has its
    own. More log probabilities than there are tokens become as many as there are."""
    temperature = message.temperature if message.HasField("temperature") else _DEFAULTS.temperature
    top_k = message.top_k if message.HasField("top_k") else _DEFAULTS.top_k
    top_p = message.top_p if message.HasField("top_p") else _DEFAULTS.top_p
    min_p = message.min_p if message.HasField("min_p") else _DEFAULTS.min_p
    repetition = message.repetition_penalty if message.HasField("repetition_penalty") else _DEFAULTS.repetition_penalty
    for name, value, allowed in (
        ("temperature", temperature, bounds.TEMPERATURE),
        ("top_k", top_k, bounds.TOP_K),
        ("top_p", top_p, bounds.TOP_P),
        ("min_p", min_p, bounds.MIN_P),
        ("presence_penalty", message.presence_penalty, bounds.PRESENCE_PENALTY),
        ("frequency_penalty", message.frequency_penalty, bounds.FREQUENCY_PENALTY),
        ("repetition_penalty", repetition, bounds.REPETITION_PENALTY),
        ("num_logprobs", message.num_logprobs, bounds.NUM_LOGPROBS),
        ("num_prompt_logprobs", message.num_prompt_logprobs, bounds.NUM_LOGPROBS),
    ):
        require_in(allowed, f"sampling.{name}", value)
    check_token_ids("sampling.allowed_token_ids", message.allowed_token_ids, vocab_size)
    check_token_ids("sampling.banned_token_ids", message.banned_token_ids, vocab_size)
    return SamplingParams(
        temperature=temperature,
        top_k=max(top_k, 0),
        top_p=top_p,
        min_p=min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=repetition,
        logit_bias=_bias_from_pb(message.logit_bias, vocab_size),
        allowed_token_ids=tuple(dict.fromkeys(message.allowed_token_ids)),
        banned_token_ids=tuple(dict.fromkeys(message.banned_token_ids)),
        bad_token_sequences=_bad_sequences_from_pb(message.bad_token_sequences, vocab_size),
        grammar=_grammar_from_pb(message.structured_output) if message.HasField("structured_output") else None,
        num_logprobs=min(message.num_logprobs, vocab_size) if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=min(message.num_prompt_logprobs, vocab_size)
        if message.HasField("num_prompt_logprobs")
        else None,
    )


def check_together(message: v1.SequenceGroup) -> None:
    """Fields that contradict each other. Raises InvalidArgumentError."""
    if message.sampling.HasField("beam_search"):
        for name in bounds.excluded_by_beams(message.sampling):
            raise InvalidArgumentError.of(f"sampling.{name}", "is set; none with beam_search is needed")
    if message.sampling.HasField("structured_output"):
        # The end of a grammar is told by an end-of-sequence token.
        require(not message.ignore_eos, "ignore_eos", True, "false with structured_output")
        require(message.min_tokens == 0, "min_tokens", message.min_tokens, "0 with structured_output")


def _bias_from_pb(entries: Sequence[v1.LogitBias], vocab_size: int) -> tuple[tuple[int, float], ...]:
    require_length(0, bounds.MAX_BIASES, "sampling.logit_bias", entries)
    biases: dict[int, float] = {}
    for i, entry in enumerate(entries):
        field = f"sampling.logit_bias[{i}]"
        check_token_ids(f"{field}.token_id", (entry.token_id,), vocab_size)
        require_in(bounds.BIAS, f"{field}.bias", entry.bias)
        require(entry.token_id not in biases, f"{field}.token_id", entry.token_id, "each token once")
        biases[entry.token_id] = entry.bias
    return tuple(biases.items())


def _bad_sequences_from_pb(sequences: Sequence[v1.TokenSequence], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    field = "sampling.bad_token_sequences"
    require_length(0, bounds.MAX_BAD_SEQUENCES_ON_WIRE, field, sequences)
    bad = [tuple(sequence.token_ids) for sequence in sequences]
    for i, ids in enumerate(bad):
        require_length(1, bounds.MAX_BAD_SEQUENCE_TOKENS_ON_WIRE, f"{field}[{i}].token_ids", ids)
        check_token_ids(f"{field}[{i}].token_ids", ids, vocab_size)
    return tuple(dict.fromkeys(bad))


def _grammar_from_pb(message: v1.StructuredOutput, field: str = "sampling.structured_output") -> Grammar:
    kind = message.WhichOneof("constraint")
    if kind is None:
        raise InvalidArgumentError.of(field, "one constraint is needed")
    if kind == "json_object":
        require(message.json_object, f"{field}.json_object", False, "true, where it is set")
        text = ""
    elif kind == "choice":
        choices = list(message.choice.choices)
        require_length(1, bounds.MAX_CHOICES, f"{field}.choice.choices", choices)
        require(all(choices), f"{field}.choice.choices", choices, "none of them empty")
        text = json.dumps(choices)
    elif kind == "composite":
        text = _composite_text(message.composite, f"{field}.{kind}")
    else:
        text = {"json_schema": message.json_schema, "regex": message.regex, "grammar": message.grammar}[kind]
        require(bool(text), f"{field}.{kind}", "empty", "some text")
    require_at_most(bounds.MAX_GRAMMAR_BYTES, f"{field}.{kind}", len(text.encode()), "bytes long")
    return Grammar(GrammarKind(kind), text)


def _composite_text(message: v1.CompositeGrammar, field: str) -> str:
    """As GrammarKind.COMPOSITE wants it."""
    require(bool(message.grammar), f"{field}.grammar", "empty", "some text")
    parts: dict[str, list[str]] = {}
    for i, part in enumerate(message.parts):
        at = f"{field}.parts[{i}]"
        require(part.name not in parts, f"{at}.name", repr(part.name), "a name of its own")
        require(not part.constraint.HasField("composite"), f"{at}.constraint", "composite", "any other constraint")
        grammar = _grammar_from_pb(part.constraint, f"{at}.constraint")
        parts[part.name] = [grammar.kind.value, grammar.text]
    return json.dumps([message.grammar, parts])
