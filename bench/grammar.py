"""Two grammar libraries on SmolLM2's tokenizer, one core: compile, one mask, masks of a batch, memory, what is refused.

llguidance is what the worker uses. xgrammar is measured where it can be imported; it wants torch, triton and
transformers, and is no dependency of ours.
"""

import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from bench.common import Figure, finish, parse_arguments
from worker.core.params import Grammar, GrammarKind
from worker.loader.load_config import load_model_config
from worker.loader.source import resolve_model
from worker.loader.tokenizer import load_tokenizer_files

BATCH = 64
EOS = 2
NUM_MATCHERS = 4096
"""Matchers of one schema at once, for their memory."""


@dataclass(frozen=True)
class Case:
    grammar: Grammar
    example: str
    """A text that it allows; masks are computed along its tokens."""


def schema(value: object, example: object) -> Case:
    return Case(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value)), json.dumps(example))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z]+@[a-z]+\\.(com|org)$"},
    },
    "required": ["name", "age", "email"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["leaf", "branch", "root"]},
                "weight": {"type": "number"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 4},
            },
            "required": ["kind", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
LEAF = {"kind": "leaf", "weight": 0.25, "children": []}
CASES = {
    "flat": schema(PERSON, {"name": "Ada Lovelace", "age": 36, "email": "ada@example.org"}),
    "nested": schema(TREE, {"kind": "root", "weight": 1.5, "children": [LEAF, {"kind": "branch", "children": [LEAF]}]}),
    "enum_500": schema({"enum": [f"item {i * 7919 % 10007}" for i in range(500)]}, "item 7919"),
    "open_object": schema({"type": "object"}, {"a": [1, True, None], "text": "a longer text, with \"quotes\" in it"}),
    "regex": Case(Grammar(GrammarKind.REGEX, r"[A-Z][a-z]{2,20}(, [A-Z][a-z]{2,20}){0,9}\."), "Paris, London, Rome."),
    "lark": Case(
        Grammar(GrammarKind.EBNF, 'start: e\ne: t (("+"|"-") t)*\nt: f (("*"|"/") f)*\nf: /[0-9]+/ | "(" e ")"\n'),
        "(12+3)*45-(6/(7+8))*9",
    ),
}  # fmt: skip
FEATURES: dict[str, tuple[dict[str, Any], object]] = {
    "not": ({"not": {"type": "string"}}, "x"),
    "oneOf, disjoint": ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, True),
    "oneOf, overlapping": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, 1),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, 99),
    "allOf, contradictory": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "x"),
    "if/then": ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "four"),
    "uniqueItems": ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [1, 1]),
    "contains": ({"type": "array", "contains": {"const": 1}}, [2]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, 8),
    "format": ({"type": "string", "format": "date-time"}, "x"),
    "patternProperties": ({"type": "object", "patternProperties": {"^x-": {"type": "integer"}}}, {"x-a": "b"}),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, {"A": 1}),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, {"a": 1}),
    "minimum above maximum": ({"type": "integer", "minimum": 5, "maximum": 3}, 4),
    "maxLength": ({"type": "string", "maxLength": 3}, "four"),
}
"""What a schema may ask, and an output that breaks it."""


class Library(Protocol):
    """Compiled grammars and matchers are the library's own objects."""

    def compile(self, grammar: Grammar) -> Any:
        """From the text to the first mask. Raises ValueError or RuntimeError."""

    def matcher(self, compiled: Any) -> Any: ...

    def fill(self, matchers: list[Any], masks: np.ndarray) -> None:
        """One row of `masks`, int32 [N, ceil(V / 32)], for each matcher, in one thread."""

    def advance(self, matcher: Any, token: int) -> bool: ...


class Llguidance:
    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        from llguidance import LLExecutor, LLMatcher, LLTokenizer

        self._matcher = LLMatcher
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token_ids)
        self._executor = LLExecutor(1)

    def compile(self, grammar: Grammar) -> Any:
        make = {
            GrammarKind.JSON_SCHEMA: self._matcher.grammar_from_json_schema,
            GrammarKind.REGEX: self._matcher.grammar_from_regex,
            GrammarKind.EBNF: self._matcher.grammar_from_lark,
        }[grammar.kind]
        compiled = self._matcher(self._tokenizer, make(grammar.text), log_level=0)
        if compiled.is_error():
            raise ValueError(compiled.get_error())
        compiled.compute_bitmask()
        return compiled

    def matcher(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def fill(self, matchers: list[Any], masks: np.ndarray) -> None:
        rows = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.strides[0], len(masks))

    def advance(self, matcher: Any, token: int) -> bool:
        return matcher.consume_token(token)


class Xgrammar:
    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        import xgrammar

        self._library = xgrammar
        vocabulary = Tokenizer.from_str(tokenizer).get_vocab()
        info = xgrammar.TokenizerInfo(
            sorted(vocabulary, key=vocabulary.__getitem__), xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=vocab_size, stop_token_ids=eos_token_ids,
        )  # fmt: skip
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(1)

    def compile(self, grammar: Grammar) -> Any:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            compiled = self._compiler.compile_json_schema(grammar.text, strict_mode=False)
        elif grammar.kind is GrammarKind.REGEX:
            compiled = self._compiler.compile_regex(grammar.text)
        else:
            compiled = self._compiler.compile_lark(grammar.text)
        self.fill([self.matcher(compiled)], np.zeros((1, compiled.tokenizer_info.vocab_size // 32), np.int32))
        return compiled

    def matcher(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def fill(self, matchers: list[Any], masks: np.ndarray) -> None:
        self._batch.batch_fill_next_token_bitmask(matchers, masks)

    def advance(self, matcher: Any, token: int) -> bool:
        return matcher.accept_token(token)


def main() -> None:
    quick = parse_arguments(__doc__).quick
    source = resolve_model("smollm2")
    config = load_model_config(source)
    tokenizer = load_tokenizer_files(source).files["tokenizer.json"].decode()
    encode = Tokenizer.from_str(tokenizer).encode
    tokens_of = {name: encode(case.example).ids for name, case in CASES.items()}
    libraries: dict[str, type[Llguidance] | type[Xgrammar]] = {"llguidance": Llguidance}
    if importlib.util.find_spec("xgrammar") is None:
        print("xgrammar is left out: it is not installed", flush=True)
    else:
        libraries["xgrammar"] = Xgrammar
    figures: dict[str, Figure] = {}
    for name, kind in libraries.items():
        start = time.perf_counter()
        library = kind(tokenizer, config.vocab_size, list(config.eos_token_ids))
        figures[f"{name}_tokenizer_s"] = round(time.perf_counter() - start, 3)
        masks = np.zeros((BATCH, config.vocab_size // 32), np.int32)
        figures[f"{name}_kb_per_matcher"] = kb_per_matcher(library, tokens_of["nested"], masks[:1])
        for case_name, case in CASES.items():
            measured = measure(library, case, tokens_of[case_name], masks, num_repeats=1 if quick else 5)
            figures |= {f"{name}_{key}_{case_name}": value for key, value in measured.items()}
            print(name, case_name, measured, flush=True)
        refused, broken = refused_and_broken(library, encode)
        figures |= {f"{name}_num_refused": len(refused), f"{name}_num_broken": len(broken)}
        print(name, "refuses:", ", ".join(refused), "| breaks:", ", ".join(broken), flush=True)
    finish("grammar", figures, quick=quick, dtype="none", threads=1, packages=("llguidance", "xgrammar"))


def measure(library: Library, case: Case, tokens: Items[int], masks: np.ndarray, num_repeats: int) -> dict[str, float]:
    """Compile, one mask (mean and largest along the example), and masks of a batch in which all rows walk along it."""
    compile_times, batch_times, mask_times = [], [], []
    for _ in range(num_repeats):
        start = time.perf_counter()
        compiled = library.compile(case.grammar)
        compile_times.append(time.perf_counter() - start)
        one, all_rows = library.matcher(compiled), [library.matcher(compiled) for _ in masks]
        for token in tokens:
            start = time.perf_counter()
            library.fill([one], masks[:1])
            mask_times.append(time.perf_counter() - start)
            start = time.perf_counter()
            library.fill(all_rows, masks)
            batch_times.append(time.perf_counter() - start)
            assert masks[0, token // 32] >> (token % 32) & 1, f"{case.example!r} is not allowed"
            assert all(library.advance(matcher, token) for matcher in (one, *all_rows))
    return {
        "compile_ms": round(statistics.median(compile_times) * 1e3, 2),
        "mask_us": round(statistics.mean(mask_times) * 1e6, 1),
        "most_mask_us": round(max(mask_times) * 1e6, 1),
        f"batch_ms_{BATCH}": round(statistics.mean(batch_times) * 1e3, 3),
    }


def kb_per_matcher(library: Library, tokens: Items[int], mask: np.ndarray) -> float:
    """Memory of a sequence's state beside what all sequences of its grammar share, in the midst of the example."""
    compiled = library.compile(CASES["nested"].grammar)
    before = rss()
    matchers = [library.matcher(compiled) for _ in range(NUM_MATCHERS)]
    for matcher in matchers:
        for token in tokens[: len(tokens) // 2]:
            library.fill([matcher], mask)
            library.advance(matcher, token)
    return round((rss() - before) / NUM_MATCHERS / 1024, 1)


def rss() -> int:
    """Resident memory of this process in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def refused_and_broken(library: Library, encode: Callable[[str], Any]) -> tuple[list[str], list[str]]:
    """Features of JSON schema that are refused; those that are taken, and then not held to."""
    refused, broken = [], []
    for name, (value, invalid) in FEATURES.items():
        try:
            compiled = library.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value)))
        except (ValueError, RuntimeError):
            refused.append(name)
            continue
        matcher = library.matcher(compiled)
        if all(library.advance(matcher, token) for token in [*encode(json.dumps(invalid)).ids, EOS]):
            broken.append(name)
    return refused, broken


if __name__ == "__main__":
    main()
