"""Structured output of a real model at temperature 1: what ends by itself is valid, without exception."""

import json
import re

import jsonschema
import pytest
from tokenizers import Tokenizer

from tests.engine.loop import Loop, make_sequence
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.params import Grammar, GrammarKind, SamplingParams, StopConditions
from worker.core.stopping import FinishReason
from worker.loader.source import resolve_model
from worker.loader.tokenizer import load_tokenizer_files
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

ENDINGS = frozenset({0, 2})
MAX_MODEL_LEN = 1024
NUM_BLOCKS = 512


def record(**properties):
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


NAME = {"type": "string", "maxLength": 12}
AGE = {"type": "integer", "minimum": 0, "maximum": 120}
COLOUR = {"enum": ["red", "green", "dark blue"]}
SCHEMAS = [
    record(name=NAME),
    record(name=NAME, age=AGE),
    record(colour=COLOUR, ok={"type": "boolean"}),
    record(point=record(x={"type": "integer", "minimum": -9, "maximum": 9}, y=AGE)),
    record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    record(day={"type": "string", "format": "date"}),
    record(value={"anyOf": [COLOUR, AGE, {"type": "null"}]}),
    record(shape={"oneOf": [record(kind={"const": "circle"}, r=AGE), record(kind={"const": "line"})]}),
    {"$defs": {"age": AGE}, "type": "array", "items": {"$ref": "#/$defs/age"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [NAME, AGE], "items": False, "minItems": 2},
    {"type": "object", "properties": {"a": AGE, "b": NAME}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x-[a-z]{1,3}$": COLOUR}, "additionalProperties": False,
     "maxProperties": 2},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"type": "string", "minLength": 3, "maxLength": 8},
    {"type": "string", "enum": ["caf\u00e9", "\u65e5\u672c", 'quote"', "back\\slash"]},
    {"type": "number", "enum": [0.5, 2.25, -3e10]},
    {"type": ["integer", "null"], "minimum": 10, "maximum": 12},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"const": {"a": [1, None, True], "b": "c"}},
    record(list={"type": "array", "items": record(n=AGE), "maxItems": 2}),
]  # fmt: skip
PROMPTS = ["An example in JSON:", "{", "Answer with JSON only.\n", "The following record is valid:\n\n"]
OTHERS = {
    GrammarKind.REGEX: r"[A-Z][a-z]{1,9}( [A-Z][a-z]{1,9}){0,2}, [0-9]{1,3}",
    GrammarKind.EBNF: 'start: sum\nsum: N ("+" N){1,3} " = " N\nN: /[1-9][0-9]{0,2}/',
    GrammarKind.CHOICE: '["certainly", "certainly not", "per\\"haps", "\u00e7a d\u00e9pend"]',
}


@pytest.fixture(scope="module")
def runner():
    config = RunnerConfig(
        device="cpu", num_blocks=NUM_BLOCKS, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=MAX_MODEL_LEN
    )
    return build_runner(config, Group())[0]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_str(load_tokenizer_files(resolve_model("smollm2")).files["tokenizer.json"].decode())


def run(runner, tokenizer, grammars) -> list[str]:
    """The outputs; each must end by itself, with one of the model's ending tokens alone."""
    loop = Loop(
        runner,
        SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=64, max_num_batched_tokens=2048, async_depth=1),
        CacheConfig(num_blocks=NUM_BLOCKS),
    )
    stop = StopConditions(max_tokens=MAX_MODEL_LEN, eos_token_ids=ENDINGS)
    queue = []
    for i, grammar in enumerate(grammars):
        prompt = tokenizer.encode(PROMPTS[i % len(PROMPTS)]).ids
        sampling = SamplingParams(temperature=1.0, seed=i, grammar=grammar)
        queue.append(make_sequence(i, prompt, MAX_MODEL_LEN, sampling, stop=stop))
    tokens = loop.run(*queue)
    assert {output.finish_reason for output in loop.ended.values()} == {FinishReason.EOS}
    assert all([token in ENDINGS for token in ids] == [False] * (len(ids) - 1) + [True] for ids in tokens.values())
    return [tokenizer.decode(tokens[i][:-1], skip_special_tokens=False) for i in range(len(grammars))]


@pytest.mark.soak
def test_all_outputs_validate(runner, tokenizer, is_soak):
    """200 of 200 in the long version."""
    schemas = [schema for schema in SCHEMAS for _ in range(10 if is_soak else 3)]
    grammars = [Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in schemas]
    outputs = run(runner, tokenizer, grammars)
    for schema, output in zip(schemas, outputs, strict=True):
        jsonschema.validate(json.loads(output), schema, format_checker=jsonschema.FormatChecker())
    assert len(set(outputs)) > len(outputs) / 2


def test_other_kinds(runner, tokenizer):
    grammars = [Grammar(kind, text) for kind, text in OTHERS.items() for _ in range(8)]
    outputs = run(runner, tokenizer, grammars)
    sums = r"[1-9][0-9]{0,2}(\+[1-9][0-9]{0,2}){1,3} = [1-9][0-9]{0,2}"
    assert all(re.fullmatch(OTHERS[GrammarKind.REGEX], output) for output in outputs[:8]), outputs[:8]
    assert all(re.fullmatch(sums, output) for output in outputs[8:16]), outputs[8:16]
    assert set(outputs[16:]) <= set(json.loads(OTHERS[GrammarKind.CHOICE])), outputs[16:]
