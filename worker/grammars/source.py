"""A grammar's text in the library's own form. What the library would not hold to is refused here, by its place."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from math import lcm
from typing import Any, TypeGuard

from llguidance import LLMatcher

from worker.core.params import Grammar, GrammarKind
from worker.grammars.depth import check_lark_depth, check_schema_depth
from worker.grammars.errors import GrammarError

MAX_MULTIPLE = 100_000
"""The library's work for multipleOf grows with the number, without a limit of its own."""
MAX_BOUND = 2**53 - 1
"""The library computes with double-precision numbers. Up to here an integer and its neighbours are exact."""
WHITESPACE = r"\x20|\r?\n[\x20\t]{0,40}"
"""Between the parts of JSON: a space, or a line break and an indent. Where more is allowed, small models go on with
blanks until they are out of tokens. `x-guidance` in a schema goes first."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DATA = ("const", "enum")


def to_source(grammar: Grammar) -> str:
    """Raises GrammarError."""
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
            check_lark_depth(grammar.text)
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.CHOICE:
            alternatives = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}\n")
        case GrammarKind.COMPOSITE:
            return _composite_source(grammar)


def _composite_source(grammar: Grammar) -> str:
    """The library knows grammars of several: the first one is the whole, the others have names."""
    main: str = json.loads(grammar.text)[0]
    check_lark_depth(main)
    grammars: list[dict[str, Any]] = [{"lark_grammar": main}]
    for name, part in parts_of(grammar).items():
        with named(name):
            source = to_source(part)
            parsed = json.loads(source) if source.startswith("{") else {"grammars": [{"lark_grammar": source}]}
            grammars.append({**parsed["grammars"][0], "name": name})
    return json.dumps({"grammars": grammars})


def parts_of(composite: Grammar) -> dict[str, Grammar]:
    parts: dict[str, list[str]] = json.loads(composite.text)[1]
    return {name: Grammar(GrammarKind(kind), text) for name, (kind, text) in parts.items()}


@contextmanager
def named(part: str) -> Iterator[None]:
    """An error of a part says which it is."""
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{part}: {error}") from None


def _schema_source(text: str) -> str:
    try:
        schema = json.loads(text, parse_float=Decimal)
        check_schema_depth(schema)
        _check_values(schema)
        # Our own reading goes on, so that the library sees what was checked.
        text = json.dumps(schema, allow_nan=False, default=float)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"it is not JSON: {error}") from None
    try:
        if not isinstance(schema, dict):
            return LLMatcher.grammar_from_json_schema(text)
        return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise GrammarError(str(error)) from None


def _check_values(schema: Any) -> None:
    multiple = 1
    for path, node, is_data in _walk(schema):
        if isinstance(node, dict):
            _check_keywords(node, path)
            multiple = lcm(multiple, _digits(node.get("multipleOf")))
            if multiple > MAX_MULTIPLE:
                raise GrammarError(
                    f"{path}: multipleOf is too fine: the least common multiple of all its numbers, without decimal "
                    f"points and zeros at their ends, may be {MAX_MULTIPLE} at most"
                )
        elif is_data and _is_number(node) and not _is_exact(node):
            raise GrammarError(f"{path}: {_short(node)} has more digits than a double-precision number")


def _walk(schema: Any) -> Iterator[tuple[str, Any, bool]]:
    """(JSON pointer, node, whether it may be a part of data: below `const` or `enum`)."""
    pending = [("#", schema, False)]
    while pending:
        path, node, is_data = pending.pop()
        yield path, node, is_data
        if isinstance(node, list):
            pending += [(f"{path}/{i}", item, is_data) for i, item in enumerate(node)]
        elif isinstance(node, dict):
            pending += [(f"{path}/{_escaped(name)}", item, is_data or name in _DATA) for name, item in node.items()]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _check_keywords(schema: dict[str, Any], path: str) -> None:
    for name in _BOUNDS:
        bound: Any = schema.get(name)
        if _is_number(bound) and not (-MAX_BOUND <= bound <= MAX_BOUND and _is_exact(bound)):
            raise GrammarError(
                f"{path}/{name}: {_short(bound)} cannot be held to exactly: bounds are at most ±(2^53 − 1), and have "
                "no more digits than a double-precision number"
            )
    least: Any = schema.get("minProperties")
    required: Any = schema.get("required")
    num_required = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
    # The library counts properties, and keeps only required ones from coming twice: with one more it must differ.
    if _is_number(least) and least > num_required + 1:
        raise GrammarError(
            f"{path}/minProperties: may be at most one more than the required properties, {num_required}, is "
            f"{_short(least)}: others could be one name, repeated"
        )


def _is_number(value: Any) -> TypeGuard[int | Decimal]:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_exact(number: int | Decimal) -> bool:
    """Whether it is how its nearest double-precision number is written."""
    try:
        return Decimal(repr(float(number))) == number
    except OverflowError:
        return False


def _short(number: int | Decimal) -> str:
    text = str(number)
    return text if len(text) <= 40 else f"{text[:20]}…, a number of {len(text)} digits,"


def _digits(number: Any) -> int:
    """Of a positive number, without decimal point and zeros around them: 25 for 0.025 and for 2500. 1 for others."""
    if not _is_number(number) or not number > 0:
        return 1
    return int("".join(map(str, Decimal(number).as_tuple().digits)).rstrip("0"))
