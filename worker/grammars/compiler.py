"""Grammars → matchers over the model's tokens, through llguidance. No torch.

A matcher says which tokens may come next, and is told which one came. It is lazy: compiling builds little more than the
lexer, and what a state allows is found when it is asked for. End-of-sequence tokens are allowed only where the grammar
may end.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from worker.core.params import Grammar, GrammarKind
from worker.grammars.errors import GrammarError
from worker.grammars.source import named, parts_of, to_source
from worker.loader.errors import ModelError

MAX_COMPILED, MAX_COMPILED_TEXT = 256, 8 * 1024 * 1024
"""Grammars that are kept though no open request uses them, and characters of these. One takes 50 to 100 kB; large ones
65 bytes a character."""
LEXER_FUEL = 300_000
"""For building a lexer: enough for 20,000 alternatives. More would let a few characters take a second and 100 MB."""
STEP_FUEL = 50_000
"""For the lexer's work on one mask: about 4 ms."""
MAX_LEXER_STATES = 50_000
"""Of one matcher, at 1 to 2 kB each."""
STACK_BYTES = 256 * 1024 * 1024
"""Of native stack, for compiling: the library recurses there, and only there. Reserved, not used."""
MAX_ERROR_LENGTH = 500
NO_EXTENSION = ("NoExtension", "NoExtensionBias")
"""The library's words for it."""


@dataclass(slots=True)
class _Kept:
    """A grammar that open requests use."""

    num_uses: int = 0
    matcher: LLMatcher | None = None


class GrammarCompiler:
    """Of one model. All methods may be called from any thread."""

    def __init__(
        self,
        load_tokenizer: Callable[[], bytes],
        vocab_size: int,
        eos_token_ids: Iterable[int],
        stack_bytes: int = STACK_BYTES,
    ) -> None:
        """`load_tokenizer` gives the contents of tokenizer.json, when the first grammar comes. `vocab_size` is the
        model's, which may be larger or smaller than the tokenizer's."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._stack_bytes = stack_bytes
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._kept: dict[Grammar, _Kept] = {}
        self._unused: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        """The least recently used one first."""
        self._num_unused_characters = 0
        self._lock = threading.Lock()
        self._limits = LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL,
            step_lexer_fuel=STEP_FUEL,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )

    @property
    def mask_words(self) -> int:
        """int32 words of a mask: of the model's vocabulary, or of the tokenizer's where that is larger."""
        return -(-self.tokenizer().vocab_size // 32)

    def keep(self, grammar: Grammar) -> None:
        """What is compiled of `grammar`, now or later, stays until as many `release`s have come."""
        with self._lock:
            kept = self._kept.setdefault(grammar, _Kept())
            kept.num_uses += 1
            if grammar in self._unused:
                kept.matcher = self._take_unused(grammar)

    def release(self, grammar: Grammar) -> None:
        with self._lock:
            kept = self._kept[grammar]
            kept.num_uses -= 1
            if kept.num_uses:
                return
            del self._kept[grammar]
            if kept.matcher is not None:
                self._put_unused(grammar, kept.matcher)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning of `grammar`, the caller's own. Raises GrammarError."""
        return self.compile(grammar).deep_copy()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """What all matchers of `grammar` are copies of; not to be changed.

        Raises GrammarError: malformed, not supported, too large, or nothing matches it. Takes milliseconds as a rule,
        at worst a second; the GIL is free meanwhile.
        """
        with self._lock:
            found = self._find(grammar)
        if found is not None:
            return found
        compiled = self.build(grammar)
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                kept.matcher = compiled
            else:
                self._put_unused(grammar, compiled)
        return compiled

    def _find(self, grammar: Grammar) -> LLMatcher | None:
        if grammar in self._unused:
            self._unused.move_to_end(grammar)
            return self._unused[grammar]
        kept = self._kept.get(grammar)
        return kept.matcher if kept is not None else None

    def _take_unused(self, grammar: Grammar) -> LLMatcher:
        self._num_unused_characters -= len(grammar.text)
        return self._unused.pop(grammar)

    def _put_unused(self, grammar: Grammar, compiled: LLMatcher) -> None:
        """The least recently used ones go, so that there is room."""
        if grammar in self._unused:  # two threads compiled it
            self._take_unused(grammar)
        self._unused[grammar] = compiled
        self._num_unused_characters += len(grammar.text)
        while len(self._unused) > MAX_COMPILED or self._num_unused_characters > MAX_COMPILED_TEXT:
            self._take_unused(next(iter(self._unused)))

    def build(self, grammar: Grammar) -> LLMatcher:
        """As `compile`, without looking for it or keeping it."""
        source = to_source(grammar)
        tokenizer = self.tokenizer()
        matcher = _on_a_deep_stack(
            lambda: LLMatcher(tokenizer, source, log_level=0, limits=self._limits), self._stack_bytes
        )
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
        for name, part in parts_of(composite).items():
            with named(name):
                self.build(part)

    def tokenizer(self) -> LLTokenizer:
        """Raises GrammarError if the model's does not work."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._make_tokenizer(self._load_tokenizer().decode())
                except (ModelError, ValueError) as error:
                    raise GrammarError(f"the model's tokenizer does not work with grammars: {error}") from error
            return self._tokenizer

    def _make_tokenizer(self, text: str) -> LLTokenizer:
        """Of as many tokens as the model has, or as the tokenizer has, where these are more: no text has the first,
        no logit the others."""
        try:
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except ValueError:
            return LLTokenizer(text, eos_token=self._eos_token_ids)


_STACK_SIZE_LOCK = threading.Lock()


def _on_a_deep_stack(make: Callable[[], LLMatcher], num_bytes: int) -> LLMatcher:
    """`make` in a thread of its own, with a stack of `num_bytes`."""
    result: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            result.set_result(make())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="deep-stack")
    with _STACK_SIZE_LOCK:
        usual = threading.stack_size(num_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return result.result()


def error_of(matcher: LLMatcher) -> str:
    """What is wrong with a matcher that is in error, in a few lines."""
    text = matcher.get_error().split("\n<")[0].strip()
    return "no text matches it" if text in NO_EXTENSION else text[:MAX_ERROR_LENGTH]
