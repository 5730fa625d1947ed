"""What an answer is held to, in each format: the grammar takes what its parser reads, and nothing else."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer

from fissile.errors import FailedPreconditionError
from fissile.v1 import (
    ChatMessage,
    ChatRequest,
    Choice,
    GenerationOptions,
    SamplingParams,
    StructuredOutput,
    Tool,
    ToolChoice,
    ToolChoiceMode,
)
from router.asking.answer_grammar import answer_grammar
from router.asking.chat import render_chat
from router.formats.events import CallArguments, CallStart, Content, Reasoning
from router.formats.registry import FORMATS
from router.model.chat_template import ChatTemplate
from tests.fakes import tokenizer as toys
from worker.face.convert_sampling import _grammar_from_pb
from worker.grammars.compiler import GrammarCompiler

REQUIRED, AUTO, NONE = (getattr(ToolChoiceMode, f"TOOL_CHOICE_MODE_{name}") for name in ("REQUIRED", "AUTO", "NONE"))
EOS = 2
INTEGER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [Tool(name="f", parameters=json.dumps(INTEGER)), Tool(name="g")]
CHOICE = StructuredOutput(choice=Choice(choices=["yes", "no"]))
TEMPLATE = "{{ messages[0].content }}{{ tools }}{{ end }}"
ENDS = {"harmony": "<|start|>assistant"}
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "qwen3": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}',
}
TWO = {
    "hermes": f"{CALLS['hermes']}\n{CALLS['hermes']}",
    "glm": f"{CALLS['glm']}\n{CALLS['glm']}",
    "deepseek": CALLS["deepseek"].replace("<｜tool▁calls▁end｜>", "")
    + CALLS["deepseek"].replace("<｜tool▁calls▁begin｜>", ""),
}
BEFORE_CONTENT = {"harmony": "<|channel|>final<|message|>"}
REASONING = {
    "qwen3": "<think>\nhm\n</think>\n\n",
    "glm": "<think>hm</think>\n",
    "deepseek": "<think>hm</think>",
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
}


def tokenizer_of(name: str, *, special: bool) -> Tokenizer:
    """With the format's markers as tokens of their own."""
    tokenizer = toys.byte_level(300)
    markers = [AddedToken(text, special=special) for text in sorted(FORMATS[name].markers)]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(markers)
    return tokenizer


PLAIN = toys.byte_level(300)


class Held:
    """One request's answers."""

    def __init__(self, name, tokenizer=None, *, end=None, template=TEMPLATE, tools=TOOLS, content=None, **choice):
        self.tokenizer = tokenizer or tokenizer_of(name, special=True)
        request = ChatRequest(
            messages=[ChatMessage(role=2, content="hi")],
            tools=tools,
            options=GenerationOptions(sampling=SamplingParams(structured_output=content)),
            tool_choice=ToolChoice(**choice),
        )
        request.template_arguments.update({"end": ENDS.get(name, "") if end is None else end})
        self.reading = render_chat(ChatTemplate(template), request, name).reading
        added = {token.content: i for i, token in self.tokenizer.get_added_tokens_decoder().items()}
        self.grammar = answer_grammar(request, self.reading, added.get)
        self._compiler = GrammarCompiler(
            lambda: self.tokenizer.to_str().encode(), self.tokenizer.get_vocab_size(), [EOS]
        )

    def takes(self, text: str) -> bool:
        """Whether it may be the whole answer, its markers as tokens or letter by letter."""
        marked = self.tokenizer.encode(text, add_special_tokens=False).ids
        spelled = PLAIN.encode(text, add_special_tokens=False).ids
        (takes, same) = [self._takes(ids) for ids in (marked, spelled)]
        assert takes == same
        return takes

    def _takes(self, ids) -> bool:
        matcher = self._compiler.matcher(_grammar_from_pb(self.grammar.constraint))
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def read(self, text: str):
        """Content, reasoning and calls of an answer that it takes."""
        assert self.takes(text)
        parser = self.reading.parser()
        events = [*parser.feed(text), *parser.flush()]
        calls = [[event.name, ""] for event in events if isinstance(event, CallStart)]
        for event in events:
            if isinstance(event, CallArguments):
                calls[event.index][1] += event.text
        content, reasoning = ("".join(e.text for e in events if isinstance(e, kind)) for kind in (Content, Reasoning))
        return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call(name):
    held = Held(name, mode=REQUIRED)
    call = CALLS[name]
    assert held.read(call) == ("", "", [("f", {"x": 1})])
    assert not held.takes("")
    assert not held.takes("hi")
    assert not held.takes(f"hi {call}")
    assert not held.takes(call.replace("1", '"1"'))
    assert not held.takes(call.replace("f", "h", 1))
    if name in REASONING:
        assert held.read(REASONING[name] + call) == ("", "hm", [("f", {"x": 1})])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("special", [False, True])
def test_markers_may_be_special_tokens_or_not(name, special):
    held = Held(name, tokenizer_of(name, special=special), mode=REQUIRED)
    assert held.read(REASONING.get(name, "") + CALLS[name])[2] == [("f", {"x": 1})]
    held = Held(name, PLAIN, mode=REQUIRED)
    assert held.read(REASONING.get(name, "") + CALLS[name])[2] == [("f", {"x": 1})]


@pytest.mark.parametrize("name", TWO)
def test_several_calls_or_one(name):
    assert Held(name, mode=REQUIRED).read(TWO[name])[2] == [("f", {"x": 1})] * 2
    single = Held(name, mode=REQUIRED, single_call=True)
    assert single.takes(CALLS[name])
    assert not single.takes(TWO[name])


def test_calls_have_an_end():
    held = Held("hermes", mode=REQUIRED)
    assert held.takes("\n".join([CALLS["hermes"]] * 16))
    assert not held.takes("\n".join([CALLS["hermes"]] * 17))


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_by_name(name):
    held = Held(name, mode=REQUIRED, names=["g"])
    assert not held.takes(CALLS[name])
    assert Held(name, mode=REQUIRED, names=["f"]).takes(CALLS[name])


def test_a_tool_without_parameters_has_no_arguments():
    held = Held("hermes", mode=REQUIRED, names=["g"])
    assert held.takes('<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>')
    assert not held.takes('<tool_call>\n{"name": "g", "arguments": {"x": 1}}\n</tool_call>')


def test_arguments_that_no_tool_declares():
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": 2}}\n</tool_call>'
    assert not Held("hermes", mode=REQUIRED).takes(call)
    welcome = [Tool(name="f", parameters=json.dumps(INTEGER | {"additionalProperties": True}))]
    assert Held("hermes", tools=welcome, mode=REQUIRED).takes(call)


@pytest.mark.parametrize("name", FORMATS)
def test_at_most_one_call_where_the_model_decides(name):
    held = Held(name, single_call=True)
    before, call = BEFORE_CONTENT.get(name, ""), CALLS[name]
    assert held.read(f"{before}hi <b>")[0] == "hi <b>"
    assert held.read(call)[2] == [("f", {"x": 1})]
    assert not held.takes(TWO.get(name, call + call))
    assert not held.takes(call.replace("1", "true"))
    if not before:
        assert held.read(f"hi {call}")[::2] == ("hi ", [("f", {"x": 1})])


def test_deepseek_in_a_fence_where_the_template_has_it():
    held = Held("deepseek", template=TEMPLATE + "{# ```json #}", mode=REQUIRED)
    fenced = 'function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>'
    call = f"<｜tool▁call▁begin｜>{fenced}"
    around = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
    assert held.read(around.format(call))[2] == [("f", {"x": 1})]
    assert held.read(around.format(f"{call}\n{call}"))[2] == [("f", {"x": 1})] * 2
    assert not held.takes(CALLS["deepseek"])


GLM_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": ["a", "b"]},
        "many": {"type": "array", "items": {"$ref": "#/$defs/n"}},
        "maybe": {"type": ["string", "null"]},
    },
    "required": ["text"],
    "$defs": {"n": {"type": "integer"}},
}


def glm(**arguments):
    values = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>f\n{values}</tool_call>"


def test_values_of_glm():
    held = Held("glm", tools=[Tool(name="f", parameters=json.dumps(GLM_SCHEMA))], mode=REQUIRED)
    assert held.read(glm(text="12 <b>"))[2] == [("f", {"text": "12 <b>"})]
    arguments = {"text": "x", "kind": "b", "many": [1, 2], "maybe": "12"}
    written = {**arguments, "many": "[1, 2]", "maybe": '"12"'}
    assert held.read(glm(**written))[2] == [("f", arguments)]
    assert held.read(glm(text="x", maybe="null"))[2] == [("f", {"text": "x", "maybe": None})]
    for wrong in (
        {"kind": "a"},
        {"text": "x", "kind": "c"},
        {"text": "x", "many": '["a"]'},
        {"text": "x", "maybe": "x"},
    ):
        assert not held.takes(glm(**wrong))


@pytest.mark.parametrize(
    "schema",
    [{"properties": {"x": {"type": "string", "pattern": "a+"}}}, {"anyOf": [{"required": ["x"]}]}],
)
def test_glm_cannot_be_held_to_everything(schema):
    with pytest.raises(FailedPreconditionError) as error:
        Held("glm", tools=[Tool(name="f", parameters=json.dumps(schema))], mode=REQUIRED)
    assert [violation.field for violation in error.value.violations] == ["tools[0].parameters"]


@pytest.mark.parametrize("name", REASONING)
def test_content_is_held_behind_reasoning(name):
    held = Held(name, tools=[], content=CHOICE)
    answer = BEFORE_CONTENT.get(name, "") + "yes"
    assert held.read(answer) == ("yes", "", [])
    assert held.read(REASONING[name] + answer) == ("yes", "hm", [])
    assert not held.takes(f"{answer}x")
    assert not held.takes(REASONING[name])


@pytest.mark.parametrize(
    ("name", "end", "answer"),
    [
        ("qwen3", "<think>\n", "hm\n</think>\n\nyes"),
        ("deepseek", "<think>\n", "hm</think>yes"),
        ("glm", "<think>", "hm</think>\nyes"),
        (
            "harmony",
            "<|start|>assistant<|channel|>analysis<|message|>",
            "hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
        ),
    ],
)
def test_content_is_held_behind_reasoning_that_the_prompt_has_opened(name, end, answer):
    held = Held(name, end=end, tools=[], content=CHOICE)
    assert held.read(answer) == ("yes", "hm", [])
    assert not held.takes("yes")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("hermes", ""),
        ("qwen3", "<think>\n\n</think>\n\n"),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>"),
    ],
)
def test_where_there_is_no_reasoning_the_request_says_it_all(name, end):
    assert Held(name, end=end, tools=[], content=CHOICE).grammar is None


@pytest.mark.parametrize("name", FORMATS)
def test_content_that_is_held_or_a_call(name):
    held = Held(name, content=CHOICE)
    assert held.read(BEFORE_CONTENT.get(name, "") + "no") == ("no", "", [])
    assert held.read(CALLS[name]) == ("", "", [("f", {"x": 1})])
    assert not held.takes(BEFORE_CONTENT.get(name, "") + "maybe")
    assert not Held(name, content=CHOICE, mode=REQUIRED).takes(BEFORE_CONTENT.get(name, "") + "no")


@pytest.mark.parametrize("choice", [{}, {"mode": AUTO}, {"mode": NONE}, {"mode": NONE, "names": ["f"]}])
def test_nothing_is_held_where_nothing_is_asked(choice):
    assert Held("qwen3", **choice).grammar is None


def test_parts_are_known_by_the_fields_of_the_request():
    held = Held("qwen3", content=CHOICE, names=["g"])
    assert list(held.grammar.fields.values()) == ["tools[1].parameters", "options.sampling.structured_output.choice"]


def test_a_format_that_is_not_known_holds_no_calls():
    with pytest.raises(FailedPreconditionError, match="tool_choice: the model's chat format is not known"):
        Held("none", PLAIN, mode=REQUIRED)
    assert Held("none", PLAIN, content=CHOICE).grammar is None
