"""Grammars over a byte-level tokenizer and over SmolLM2's: exact sets of allowed tokens, and what is refused."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.runner.byte_tokenizer import END, EOS, VOCAB_SIZE, byte_tokenizer, make_compiler, of
from worker.core.params import Grammar, GrammarKind
from worker.grammars import compiler as module
from worker.grammars.compiler import GrammarCompiler
from worker.grammars.errors import GrammarError
from worker.loader.load_config import load_model_config
from worker.loader.source import resolve_model
from worker.loader.tokenizer import load_tokenizer_files


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler()


@pytest.fixture(scope="module")
def smollm2() -> tuple[GrammarCompiler, Tokenizer]:
    source = resolve_model("smollm2")
    config, files = load_model_config(source), load_tokenizer_files(source).files["tokenizer.json"]
    return GrammarCompiler(lambda: files, config.vocab_size, config.eos_token_ids), Tokenizer.from_str(files.decode())


def allowed(matcher) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


def after(compiler: GrammarCompiler, kind: GrammarKind, text: str, output: str) -> set[int]:
    """What may follow `output`, byte by byte."""
    matcher = compiler.matcher(Grammar(kind, text))
    assert matcher.consume_tokens(list(output.encode())), matcher.get_error()
    return allowed(matcher)


SCHEMA = {"type": "object", "properties": {"n": {"enum": [7, 12]}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("kind", "text", "output", "expected"),
    [
        (GrammarKind.REGEX, "[xy]z?", "", of("x", "y")),
        (GrammarKind.REGEX, "[xy]z?", "x", of("z") | END),
        (GrammarKind.REGEX, "[xy]z?", "xz", END),
        (GrammarKind.REGEX, "a*b", "", of("a", "b", "ab")),
        (GrammarKind.REGEX, "ab?c?", "", of("a", "ab", "abc")),
        (GrammarKind.REGEX, "", "", END),
        (GrammarKind.CHOICE, '["a", "ab", "x y"]', "", of("a", "ab", "x")),
        (GrammarKind.CHOICE, '["a", "ab", "x y"]', "a", of("b") | END),
        (GrammarKind.CHOICE, '["a", "ab", "x y"]', "x", of(" ")),
        (GrammarKind.CHOICE, '["a\\"/\\\\", "\u00e9"]', 'a"/', of("\\")),
        (GrammarKind.CHOICE, '["a\\"/\\\\", "\u00e9"]', "\u00e9", END),
        (GrammarKind.EBNF, 'start: "(" start ")" | "x"', "((", of("(", "x")),
        (GrammarKind.EBNF, 'start: "(" start ")" | "x"', "((x)", of(")")),
        (GrammarKind.EBNF, 'start: "(" start ")" | "x"', "((x))", END),
        (GrammarKind.EBNF, "start: N (\",\" N)*\nN: /[0-9]/", "1,2", of(",") | END),
        (GrammarKind.JSON_OBJECT, "", "", of("{")),
        (GrammarKind.JSON_OBJECT, "", '{"k": [1]}', END),
        (GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), '{"n":', of("7", "1", " ", "\n", "\r")),
        (GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), '{"n":12}', END),
        (GrammarKind.JSON_SCHEMA, '{"const": "ab"}', '"', of("ab")),
    ],
)  # fmt: skip
def test_allowed_tokens(compiler, kind, text, output, expected):
    assert after(compiler, kind, text, output) == expected


def composite(main: str, **parts: tuple[str, str]) -> str:
    return json.dumps([main, parts])


MIXED = composite(
    'start: <[256]> @n ";" @r @c @g',
    n=("json_schema", json.dumps(SCHEMA)),
    r=("regex", "a/?b"),
    c=("choice", '["x", "y z"]'),
    g=("grammar", 'start: "(" start ")" | "."'),
)


def test_a_grammar_of_others(compiler):
    matcher = compiler.matcher(Grammar(GrammarKind.COMPOSITE, MIXED))
    assert matcher.consume_tokens([EOS, *b'{"n":7};a/by z((.))'])
    assert allowed(matcher) == END


def test_blanks_of_a_part_are_those_of_any_json(compiler):
    matcher = compiler.matcher(Grammar(GrammarKind.COMPOSITE, MIXED))
    assert matcher.consume_tokens([EOS, *b"{ "])
    assert allowed(matcher) == of('"')


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (("json_schema", '{"not": {}}'), "^p: Unimplemented"),
        (("json_schema", '{"multipleOf": 10000019}'), "^p: #: multipleOf is too fine"),
        (("regex", "("), "^p: .*unclosed group"),
        (("grammar", "start: word"), "^p: .*unknown name"),
    ],
)
def test_a_part_at_fault_is_named(compiler, part, message):
    good = ("regex", "a")
    with pytest.raises(GrammarError, match="(?s)" + message):
        compiler.compile(Grammar(GrammarKind.COMPOSITE, composite("start: @good @p", good=good, p=part)))


def test_blanks_between_parts_of_json_are_bounded(compiler):
    """A space, or a line break and an indent."""
    blanks = {"": " \n\r", " ": "", "\n": " \t", "\r": "\n", "\n" + " " * 39: " \t", "\n" + " " * 40: ""}
    for before, after_it in blanks.items():
        expected = of(*after_it) | (of('"') if before != "\r" else set())
        assert after(compiler, GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), "{" + before) == expected, repr(before)


def test_a_schema_may_have_blanks_of_its_own(compiler):
    text = json.dumps(SCHEMA | {"x-guidance": {"whitespace_pattern": "_"}})
    assert after(compiler, GrammarKind.JSON_SCHEMA, text, "{") == of("_", '"')


def test_a_token_after_the_end_is_refused(compiler):
    matcher = compiler.matcher(Grammar(GrammarKind.REGEX, "x"))
    assert matcher.consume_tokens([*b"x", EOS])
    assert not matcher.consume_token(ord("x"))


def test_matchers_of_one_grammar_do_not_share_their_place(compiler):
    first, second = (compiler.matcher(Grammar(GrammarKind.REGEX, "xyz")) for _ in range(2))
    first.consume_tokens(list(b"xy"))
    assert (allowed(first), allowed(second)) == (of("z"), of("x"))


def test_smollm2_tokens(smollm2):
    compiler, tokenizer = smollm2
    matcher = compiler.matcher(Grammar(GrammarKind.CHOICE, '["yes", "no", "I do"]'))
    assert {tokenizer.decode([i]) for i in allowed(matcher)} == {"y", "ye", "yes", "n", "no", "I"}
    matcher.consume_tokens(tokenizer.encode("I").ids)
    assert {tokenizer.decode([i]) for i in allowed(matcher)} == {" do"}
    matcher.consume_tokens(tokenizer.encode(" do").ids)
    assert {tokenizer.decode([i], skip_special_tokens=False) for i in allowed(matcher)} == {
        "<|im_end|>",
        "<|endoftext|>",
    }


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.JSON_SCHEMA, "{", "it is not JSON"),
        (GrammarKind.JSON_SCHEMA, "[]", "schema must be an object or boolean"),
        (GrammarKind.JSON_SCHEMA, '"{}"', "schema must be an object or boolean"),
        (GrammarKind.JSON_SCHEMA, "false", "schema is false"),
        (GrammarKind.JSON_SCHEMA, '{"type": "number", "minimum": NaN}', "it is not JSON"),
        (GrammarKind.JSON_SCHEMA, '{"type": "text"}', "Invalid type: text"),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable"),
        (GrammarKind.JSON_SCHEMA, '{"not": {"type": "string"}}', r'Unimplemented keys: \["not"\]'),
        (GrammarKind.JSON_SCHEMA, '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/nowhere"}', "does not exist"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "https://example.com/schema.json"}', "does not fetch"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "("}', "regex parse error"),
        (GrammarKind.JSON_SCHEMA, "[" * 100_000, "nested too deeply|recursion"),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 700 + "{}" + "}" * 700, "nested too deeply|recursion"),
        (GrammarKind.REGEX, "(", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.REGEX, "|".join(f"w{i}" for i in range(100_000)), "too big"),
        (GrammarKind.REGEX, r"a[^\s\S]", "no text matches it"),
        (GrammarKind.EBNF, "start: word", "unknown name"),
        (GrammarKind.EBNF, "start: (", r"Expected token '\)'"),
        (GrammarKind.EBNF, "start: A\nA: /a/ & /b/", "no text matches it"),
        (GrammarKind.EBNF, 'start: %json {"multipleOf": 10000019}', "%json"),
    ],
)
def test_refused(compiler, kind, text, message):
    with pytest.raises(GrammarError, match=message) as error:
        compiler.compile(Grammar(kind, text))
    assert len(str(error.value)) <= module.MAX_ERROR_LENGTH


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 10_000_019},
        {"type": "number", "multipleOf": 0.10000019},
        {"allOf": [{"multipleOf": 9973}, {"type": "integer", "multipleOf": 9967}]},
        {"properties": {"a": [{"multipleOf": 10**400 + 1}]}},
    ],
)
def test_multiples_that_would_take_minutes_are_refused(compiler, schema):
    with pytest.raises(GrammarError, match="multipleOf is too fine"):
        compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


@pytest.mark.parametrize("number", [0.01, 0.25, 7, 1000, 1e6, 25_000_000])
def test_usual_multiples(compiler, number):
    compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "number", "multipleOf": number})))


@pytest.mark.parametrize("text", ["true", "{}", '{"description": "anything"}'])
def test_schemas_of_anything(compiler, text):
    assert of("[", "{", '"', "0", "t") <= after(compiler, GrammarKind.JSON_SCHEMA, text, "")


@pytest.mark.parametrize(("limit", "value"), [("MAX_COMPILED", 2), ("MAX_COMPILED_TEXT", 7)])
def test_a_grammar_is_compiled_once_while_it_is_kept(monkeypatch, limit, value):
    """Of three with three characters each, two are kept."""
    compiler = make_compiler()
    monkeypatch.setattr(module, limit, value)
    first = compiler.compile(Grammar(GrammarKind.REGEX, "111"))
    second = compiler.compile(Grammar(GrammarKind.REGEX, "222"))
    assert compiler.compile(Grammar(GrammarKind.REGEX, "111")) is first
    compiler.compile(Grammar(GrammarKind.REGEX, "333"))
    assert compiler.compile(Grammar(GrammarKind.REGEX, "111")) is first
    assert compiler.compile(Grammar(GrammarKind.REGEX, "222")) is not second


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "eos_token_ids"),
    [(b"{}", VOCAB_SIZE, (EOS,)), (None, VOCAB_SIZE, (VOCAB_SIZE,)), (None, VOCAB_SIZE, ())],
)
def test_a_model_whose_tokenizer_does_not_fit(tokenizer, vocab_size, eos_token_ids):
    compiler = GrammarCompiler(lambda: tokenizer or byte_tokenizer().to_str().encode(), vocab_size, eos_token_ids)
    with pytest.raises(GrammarError, match="the model's tokenizer does not work with grammars"):
        compiler.compile(Grammar(GrammarKind.REGEX, "x"))


@pytest.mark.parametrize("vocab_size", [259, 200])
def test_tokens_that_the_model_has_no_logits_for_harm_nobody(vocab_size):
    """The tokenizer has 260: a mask is as wide as the tokenizer."""
    compiler = GrammarCompiler(lambda: byte_tokenizer().to_str().encode(), vocab_size, (10,))
    matcher = compiler.matcher(Grammar(GrammarKind.REGEX, "abc?"))
    assert allowed(matcher) == of("a", "ab", "abc")
    assert compiler.mask_words == 9


def test_what_open_requests_use_is_kept_beside_what_fits(monkeypatch):
    monkeypatch.setattr(module, "MAX_COMPILED", 1)
    compiler = make_compiler()
    grammars = [Grammar(GrammarKind.REGEX, str(i)) for i in range(4)]
    for grammar in grammars[:3]:
        compiler.keep(grammar)
    kept = [compiler.compile(grammar) for grammar in grammars]
    compiler.compile(Grammar(GrammarKind.REGEX, "x"))
    assert [compiler.compile(grammar) for grammar in grammars[:3]] == kept[:3]
    assert compiler.compile(grammars[3]) is not kept[3]


def test_what_is_used_no_more_goes_as_others_do(monkeypatch):
    monkeypatch.setattr(module, "MAX_COMPILED", 1)
    compiler = make_compiler()
    first, second = Grammar(GrammarKind.REGEX, "1"), Grammar(GrammarKind.REGEX, "2")
    for grammar in (first, first, second):
        compiler.keep(grammar)
    compiled = compiler.compile(first), compiler.compile(second)
    compiler.release(first)
    compiler.release(second)
    assert compiler.compile(first) is compiled[0]  # one use is left
    compiler.release(first)  # the newest of the unused: the other one goes
    assert compiler.compile(first) is compiled[0]
    assert compiler.compile(second) is not compiled[1]


def test_what_was_compiled_before_it_is_used_is_kept(monkeypatch):
    monkeypatch.setattr(module, "MAX_COMPILED", 1)
    compiler = make_compiler()
    compiled = compiler.compile(Grammar(GrammarKind.REGEX, "1"))
    compiler.keep(Grammar(GrammarKind.REGEX, "1"))
    for text in "23":
        compiler.compile(Grammar(GrammarKind.REGEX, text))
    assert compiler.compile(Grammar(GrammarKind.REGEX, "1")) is compiled
