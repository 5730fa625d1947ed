"""What is refused before the library sees it: what nests too deeply, and what it would not hold to."""

import json
import random

import jsonschema
import pytest

from tests.fakes.deep import schema_chain
from tests.runner.byte_tokenizer import EOS, make_compiler
from worker.core.params import Grammar, GrammarKind
from worker.grammars.errors import GrammarError
from worker.grammars.source import to_source

LINKS = {
    "allOf": lambda next: {"allOf": [next]},
    "ref": lambda next: next,
    "array": lambda next: {"type": "array", "items": next},
    "property": lambda next: {"type": "object", "properties": {"a": next}},
    "anyOf": lambda next: {"anyOf": [{"type": "integer"}, next]},
}


def rules(num, body):
    return "start: r0\n" + "".join(f"r{i}: {body.format(f'r{i + 1}')}\n" for i in range(num)) + f'r{num}: "x"\n'


def schema(value):
    return Grammar(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("num", [2_000, 20_000])
def test_long_chains_of_definitions_are_refused(link, num):
    with pytest.raises(GrammarError, match="nested too deeply"):
        to_source(schema(schema_chain(num, LINKS[link])))


@pytest.mark.parametrize("body", ["{}", '"a" {} "b"', "({})*", '[{}] "x"', "/x/ | {} // {{"])
def test_long_chains_of_rules_are_refused(body):
    with pytest.raises(GrammarError, match="nested too deeply"):
        to_source(Grammar(GrammarKind.EBNF, rules(20_000, body)))


@pytest.mark.parametrize("link", LINKS)
def test_short_chains_compile(link):
    make_compiler().build(schema(schema_chain(50, LINKS[link])))


def test_many_rules_that_do_not_nest_compile():
    text = "start: " + " | ".join(f"r{i}" for i in range(1000)) + "\n"
    text += "".join(f'r{i}: "{i} r{i + 1} r{i + 2}" // r{i + 1}\n' for i in range(1000))
    make_compiler().build(Grammar(GrammarKind.EBNF, text))


def test_recursive_definitions_are_not_deep():
    names = [f"d{i}" for i in range(40)]
    references = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    node = {"type": "object", "properties": references}
    to_source(schema({"$defs": dict.fromkeys(names, node), "$ref": "#/$defs/d0"}))
    to_source(Grammar(GrammarKind.EBNF, "".join(f"r{i}: r{i} r0 | r1 start\n" for i in range(400)) + "start: r0\n"))


EXACT = [
    ({"const": 9007199254740993}, "#/const"),
    ({"enum": [1, {"a": [12345678901234567890]}]}, "#/enum/1/a/0"),
    ('{"const": 0.12345678901234567890}', "#/const"),
    ('{"const": 1e400}', "#/const"),
    ({"const": 12345678901234567168}, "#/const"),
    ({"const": 10**400}, "#/const"),
    ({"properties": {"a/b": {"type": "integer", "minimum": 9007199254740993}}}, "#/properties/a~1b/minimum"),
    ({"type": "integer", "exclusiveMaximum": -(2**53)}, "#/exclusiveMaximum"),
    ({"type": "number", "maximum": 1e300}, "#/maximum"),
    ({"items": {"minProperties": 2}}, "#/items/minProperties"),
    ({"minProperties": 3, "required": ["a"]}, "#/minProperties"),
    ({"minProperties": 3, "required": ["a", "a", "b"], "properties": {"c": {}}}, None),
]


@pytest.mark.parametrize(("value", "place"), EXACT)
def test_what_the_library_would_not_hold_to_is_refused_by_its_place(value, place):
    if place is None:
        to_source(schema(value))
        return
    with pytest.raises(GrammarError) as error:
        to_source(schema(value))
    assert str(error.value).startswith(f"{place}: ")


SCHEMAS = [
    {"const": 9007199254740992},
    {"const": 12345678901234567000},
    {"enum": [-9007199254740992, 0.1, 1e22, 123456789012]},
    {"type": "integer", "minimum": 2**53 - 3, "maximum": 2**53 - 1},
    {"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 4},
    {"type": "number", "minimum": 0.1, "maximum": 0.3},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"enum": [1]}},
    {"type": "object", "required": ["a", "b"], "minProperties": 3, "additionalProperties": {"enum": [1]}},
    {"type": "object", "patternProperties": {"^x[ab]$": {"enum": [1]}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"enum": [1]}}, "additionalProperties": {"enum": ["s"]}},
    {"type": "array", "items": {"enum": [1, "a"]}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"enum": [1]}], "items": {"enum": ["b"]}, "maxItems": 3},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{2}\\d$"},
    {"type": ["integer", "null"], "minimum": 3, "maximum": 5},
    {"enum": ["a", "bb", 3], "minLength": 2},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"allOf": [{"properties": {"a": {"enum": [1]}}, "required": ["a"]}, {"type": "object", "maxProperties": 2}]},
    {"$ref": "#/$defs/n", "minimum": 3, "$defs": {"n": {"type": "integer", "maximum": 12}}},
    {"oneOf": [{"type": "string", "maxLength": 1}, {"type": "integer", "minimum": 5, "maximum": 6}]},
]  # fmt: skip


@pytest.mark.parametrize("value", SCHEMAS, ids=str)
def test_what_is_written_follows_the_schema(value):
    """Random outputs, byte by byte. Blanks, escapes and long strings are left out: they would be most of all."""
    compiled = make_compiler().build(schema(value))
    choice = random.Random(0)
    for _ in range(10):
        matcher, output = compiled.deep_copy(), bytearray()
        while not matcher.is_stopped():
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [i for i in (*b'[]{}",:.-0123456789abcdefghxnulst', EOS) if mask >> i & 1]
            token = EOS if EOS in allowed else choice.choice(allowed)
            assert matcher.consume_token(token) and len(output) < 1000, bytes(output)
            output.append(token) if token != EOS else None
        jsonschema.validate(json.loads(output), value)
