"""Grammars → matchers over the model's tokens, through llguidance. No torch.

A matcher says which tokens may come next, and is told which one came. It is lazy: compiling builds little more than the
lexer, and what a state allows is found when it is asked for. End-of-sequence tokens are allowed only where the grammar
may end.
"""

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from math import lcm
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from worker.core.params import Grammar, GrammarKind
from worker.loader.errors import ModelError
from worker.runner.messages import GrammarError

MAX_COMPILED, MAX_COMPILED_TEXT = 256, 8 * 1024 * 1024
"""Grammars that are kept, and characters of all of them. One takes 50 to 100 kB; large ones 65 bytes a character."""
LEXER_FUEL = 300_000
"""For building a lexer: enough for 20,000 alternatives. More would let a few characters take a second and 100 MB."""
MAX_LEXER_STATES = 50_000
"""Of one matcher, at 1 to 2 kB each."""
MAX_MULTIPLE = 100_000
"""The library's work for multipleOf grows with the number, without a limit of its own."""
MAX_ERROR_LENGTH = 500
NO_EXTENSION = ("NoExtension", "NoExtensionBias")
"""The library's words for it."""
WHITESPACE = r"\x20|\r?\n[\x20\t]{0,40}"
"""Between the parts of JSON: a space, or a line break and an indent. Where more is allowed, small models go on with
blanks until they are out of tokens. `x-guidance` in a schema goes first."""


class GrammarCompiler:
    """Of one model. All methods may be called from any thread."""

    def __init__(self, load_tokenizer: Callable[[], bytes], vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`load_tokenizer` gives the contents of tokenizer.json, when the first grammar comes. `vocab_size` is the
        model's, which may be larger than the tokenizer's."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._num_characters = 0
        """Of the texts of `_compiled`."""
        self._compiled_lock = threading.Lock()
        self._limits = LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning of `grammar`, the caller's own. Raises GrammarError."""
        return self.compile(grammar).deep_copy()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """What all matchers of `grammar` are copies of; kept, and not to be changed.

        Raises GrammarError: malformed, not supported, too large, or nothing matches it. Takes milliseconds as a rule,
        at worst some seconds; the GIL is free meanwhile.
        """
        with self._compiled_lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return compiled
        compiled = self._compile(grammar)
        with self._compiled_lock:
            self._keep(grammar, compiled)
        return compiled

    def _keep(self, grammar: Grammar, compiled: LLMatcher) -> None:
        """The least recently used ones go, so that there is room."""
        if grammar not in self._compiled:  # two threads may have compiled it
            self._num_characters += len(grammar.text)
        self._compiled[grammar] = compiled
        while len(self._compiled) > MAX_COMPILED or self._num_characters > MAX_COMPILED_TEXT:
            dropped, _ = self._compiled.popitem(last=False)
            self._num_characters -= len(dropped.text)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        source = _to_source(grammar)
        matcher = LLMatcher(self._get_tokenizer(), source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            # What only the first mask shows: that nothing matches, or that a repetition is too large.
            matcher.compute_bitmask()
        if matcher.is_error():
            if grammar.kind is GrammarKind.COMPOSITE:
                self._blame_part(grammar)
            raise GrammarError(error_of(matcher))
        return matcher

    def _blame_part(self, composite: Grammar) -> None:
        """Raises GrammarError that names the first part that does not compile by itself, if there is one."""
        for name, part in _parts(composite).items():
            with _named(name):
                self._compile(part)

    def _get_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    text = self._load_tokenizer().decode()
                    self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
                except (ModelError, ValueError) as error:
                    raise GrammarError(f"the model's tokenizer does not work with grammars: {error}") from error
            return self._tokenizer


def error_of(matcher: LLMatcher) -> str:
    """What is wrong with a matcher that is in error, in a few lines."""
    text = matcher.get_error().split("\n<")[0].strip()
    return "no text matches it" if text in NO_EXTENSION else text[:MAX_ERROR_LENGTH]


def _to_source(grammar: Grammar) -> str:
    """In the library's own form."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _schema_source('{"type": "object"}')
        case GrammarKind.JSON_SCHEMA:
            return _schema_source(grammar.text)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.EBNF:
            if "%json" in grammar.text:
                raise GrammarError("%json is not supported inside a grammar")
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.CHOICE:
            alternatives = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}\n")
        case GrammarKind.COMPOSITE:
            return _composite_source(grammar)


def _composite_source(grammar: Grammar) -> str:
    """The library knows grammars of several: the first one is the whole, the others have names."""
    main: str = json.loads(grammar.text)[0]
    grammars: list[dict[str, Any]] = [{"lark_grammar": main}]
    for name, part in _parts(grammar).items():
        with _named(name):
            source = _to_source(part)
            parsed = json.loads(source) if source.startswith("{") else {"grammars": [{"lark_grammar": source}]}
            grammars.append({**parsed["grammars"][0], "name": name})
    return json.dumps({"grammars": grammars})


def _parts(composite: Grammar) -> dict[str, Grammar]:
    parts: dict[str, list[str]] = json.loads(composite.text)[1]
    return {name: Grammar(GrammarKind(kind), text) for name, (kind, text) in parts.items()}


@contextmanager
def _named(part: str) -> Iterator[None]:
    """An error of a part says which it is."""
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{part}: {error}") from None


def _schema_source(text: str) -> str:
    try:
        schema = json.loads(text)
        multiple = lcm(*map(_digits, _multiples(schema)))
        # Our own reading goes on, so that the library sees what was checked.
        text = json.dumps(schema, allow_nan=False)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"it is not JSON: {error}") from None
    if multiple > MAX_MULTIPLE:
        raise GrammarError(
            "multipleOf is too fine: the least common multiple of all its numbers, without decimal points and zeros at "
            f"their ends, may be {MAX_MULTIPLE} at most"
        )
    try:
        if not isinstance(schema, dict):
            return LLMatcher.grammar_from_json_schema(text)
        return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise GrammarError(str(error)) from None


def _multiples(schema: Any) -> Iterator[float]:
    """Every positive number that is a value of multipleOf."""
    if isinstance(schema, list):
        for item in schema:
            yield from _multiples(item)
    if isinstance(schema, dict):
        number = schema.get("multipleOf")
        if isinstance(number, int | float) and 0 < number < math.inf:
            yield number
        for value in schema.values():
            yield from _multiples(value)


def _digits(number: float) -> int:
    """Without decimal point and zeros around them: 25 for 0.025 and for 2500."""
    return int("".join(map(str, Decimal(str(number)).as_tuple().digits)).rstrip("0"))
