"""Messages as the templates of each family want them: small templates with the same variables."""

import pytest
from google.protobuf.struct_pb2 import Struct

from fissile.errors import FailedPreconditionError, InvalidArgumentError
from fissile.v1 import ChatMessage, ChatRequest, Tool, ToolCall, ToolChoice, ToolChoiceMode
from router.asking.chat import AUTO, NONE, render, render_chat
from router.model.chat_template import ChatTemplate
from router.model.template_traits import traits_of

SYSTEM, USER, ASSISTANT, TOOL, DEVELOPER = 1, 2, 3, 4, 5
CALL = ToolCall(id="c1", name="f", arguments='{"x": 1, "s": "é"}')
CALLED = ChatMessage(role=ASSISTANT, reasoning="hm", tool_calls=[CALL])
RESULT = ChatMessage(role=TOOL, content="42", name="f", tool_call_id="c1")

QWEN = """{%- for m in messages -%}
<{{ m.role }}>{%- if m.reasoning_content is string -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
{%- endfor -%}"""
GLM = """{%- for m in messages -%}
<|{{ m.role }}|>{%- if m.reasoning_content is string -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}{%- for k, v in call.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson if v is not string else v }}</arg_value>
{%- endfor -%}</tool_call>
{%- endfor -%}
{%- endfor -%}"""
DEEPSEEK = """{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{%- for call in m.tool_calls -%}
<｜tool▁call▁begin｜>{{ call.type + '<｜tool▁sep｜>' + call.function.name + call.function.arguments -}}
<｜tool▁call▁end｜>
{%- endfor -%}
{%- endif -%}
{%- if m.content is not none -%}<{{ m.role }}>{{ m.content }}{%- endif -%}
{%- endfor -%}"""
HARMONY = """{%- for m in messages -%}
{%- if m.role == 'tool' -%}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content }}
{%- elif m.role == 'developer' -%}<|start|>developer<|message|>{{ m.content }}
{%- elif m.tool_calls -%}
{%- if m.content and m.thinking -%}{{ raise_exception('both') }}{%- endif -%}
<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|channel|>commentary to={{ m.tool_calls[0].function.name }}
{{- '<|message|>' + m.tool_calls[0].function.arguments | tojson }}
{%- endif -%}
{%- endfor -%}"""


def rendered(template, *messages, **fields):
    return render(ChatTemplate(template), ChatRequest(messages=messages, **fields))


def test_qwen():
    call = '<tool_call>{"name": "f", "arguments": {"x": 1, "s": "é"}}</tool_call>'
    assert rendered(QWEN, CALLED, RESULT) == f"<assistant><think>hm</think>{call}<tool>42"


def test_glm():
    arguments = "<arg_key>x</arg_key><arg_value>1</arg_value><arg_key>s</arg_key><arg_value>é</arg_value>"
    call = f"<tool_call>f{arguments}</tool_call>"
    assert rendered(GLM, CALLED, RESULT) == f"<|assistant|><think>hm</think>{call}<|tool|>42"


def test_deepseek_gets_arguments_as_the_text_they_were():
    call = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f{"x": 1, "s": "é"}<｜tool▁call▁end｜>'
    assert rendered(DEEPSEEK, CALLED, RESULT) == f"{call}<tool>42"


def test_deepseek_gets_no_content_where_there_is_none():
    said = ChatMessage(role=ASSISTANT, content="I look.", tool_calls=[ToolCall(id="c1", name="f")])
    call = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f{}<｜tool▁call▁end｜>"
    assert rendered(DEEPSEEK, said) == f"{call}<assistant>I look."
    assert rendered(DEEPSEEK, ChatMessage(role=USER)) == "<user>"


def test_deepseek_arguments_are_checked_all_the_same():
    broken = ChatMessage(role=ASSISTANT, tool_calls=[CALL, ToolCall(id="c2", name="f", arguments="{")])
    with pytest.raises(InvalidArgumentError) as error:
        rendered(DEEPSEEK, broken)
    assert [v.field for v in error.value.violations] == ["messages[0].tool_calls[1].arguments"]


def test_harmony():
    expected = (
        '<|channel|>analysis<|message|>hm<|channel|>commentary to=f<|message|>{"x": 1, "s": "é"}'
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>42"
    )
    assert rendered(HARMONY, CALLED, RESULT) == expected


def test_harmony_takes_back_the_text_and_the_reasoning_of_a_call():
    both = ChatMessage(role=ASSISTANT, content="I look.", reasoning="hm", tool_calls=[ToolCall(id="c1", name="f")])
    assert rendered(HARMONY, both).startswith("<|channel|>analysis<|message|>I look.<|channel|>")


def test_a_developer_is_the_system_where_the_template_knows_no_developer():
    instructions = ChatMessage(role=DEVELOPER, content="Be brief.")
    assert rendered(QWEN, instructions) == "<system>Be brief."
    assert rendered(HARMONY, instructions) == "<|start|>developer<|message|>Be brief."


def test_only_what_is_there_is_in_a_message():
    message = ChatMessage(role=USER, content="hi")
    assert rendered("{{ messages[0] | tojson }}", message) == '{"role": "user", "content": "hi"}'


def test_the_template_for_tools_tells_the_format_of_requests_with_tools():
    template = ChatTemplate("plain", with_tools="{{ tools[0].function.name }}<tool_call>")
    tools = [Tool(name="f", parameters='{"properties": {}}')]
    without = ChatRequest(messages=[ChatMessage(role=USER)])
    chat = render_chat(template, ChatRequest(messages=[ChatMessage(role=USER)], tools=tools), AUTO)
    assert chat.text == "f<tool_call>"
    assert chat.reading and chat.reading.format.name == "hermes"
    assert chat.reading.beginning.schemas == {"f": {"properties": {}}}
    assert render_chat(template, without, AUTO).reading is None
    assert render_chat(template, without, NONE).reading is None


PARTS = "{% for m in messages %}{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}{% endfor %}"


def test_a_template_that_wants_parts_gets_them():
    """Llama-Guard's: of a text it would show nothing."""
    said = [ChatMessage(role=USER, content="hi"), ChatMessage(role=ASSISTANT, content="yes")]
    assert rendered(PARTS, *said) == "[hi][yes]"
    either = "{{ messages[0].content if messages[0].content is string else 'parts' }}"
    assert rendered(either, *said) == "hi"


def test_content_that_no_form_shows_is_refused():
    nothing = "{% for m in messages %}<{{ m.role }}>{% endfor %}"
    with pytest.raises(FailedPreconditionError) as error:
        rendered(nothing, ChatMessage(role=SYSTEM), ChatMessage(role=USER, content="hi"))
    assert [violation.field for violation in error.value.violations] == ["messages[1].content"]


KNOWS = "{{ messages[-1].content }}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
REFUSES = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
ONLY_WITH_SYSTEM = "{{ messages[-1].content }}{% if messages[0].role == 'system' %}{{ tools }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "knows"),
    [
        (KNOWS, True),
        (REFUSES, True),
        (ONLY_WITH_SYSTEM, True),
        (NO_SYSTEM, False),
        ("{{ messages[0].content }}", False),
    ],
)
def test_which_templates_know_tools(template, knows):
    assert traits_of(template).knows_tools == knows


def test_tools_that_the_template_does_not_show_are_refused():
    said, tool = ChatMessage(role=USER, content="hi"), Tool(name="f")
    with pytest.raises(FailedPreconditionError, match=r"^tools: the model's chat template does not show tools"):
        rendered(NO_SYSTEM, said, tools=[tool])
    assert rendered(KNOWS, said, tools=[tool]) == "hif"
    none = ToolChoice(mode=ToolChoiceMode.TOOL_CHOICE_MODE_NONE)
    assert rendered(NO_SYSTEM, said, tools=[tool], tool_choice=none) == "hi"


def arguments(**values):
    result = Struct()
    result.update(values)
    return result


@pytest.mark.parametrize(
    ("template", "fields", "field"),
    [
        ("{{ n + 1 }}", {"template_arguments": arguments(n="x", m=1)}, "template_arguments.n"),
        ("{{ raise_exception('no') if n or m }}", {"template_arguments": arguments(n="x", m=1)}, "template_arguments"),
        ("{{ 1 }}", {"template_arguments": arguments(tools=[1])}, "template_arguments.tools"),
        ("{{ 1 }}", {"template_arguments": arguments(messages=[])}, "template_arguments.messages"),
        ("{{ raise_exception('no') }}", {"template_arguments": arguments(n=1)}, "messages"),
        (REFUSES, {"tools": [Tool(name="f")]}, "tools"),
        ("{{ raise_exception('no') }}", {"chat_template": "{{ raise_exception('no') }}"}, "chat_template"),
        ("{{ 1 }}", {"chat_template": "{{ messages[0] + 1 }}"}, "chat_template"),
        ("{{ 1 }}", {"chat_template": "{{ n + 1 }}", "template_arguments": arguments(n="x")}, "template_arguments.n"),
    ],
)
def test_what_the_template_does_not_take_is_named(template, fields, field):
    shown = "{{ messages[0].content }}{% set n = n or 0 %}{% set m = m or 0 %}"
    fields = {name: shown + value if name == "chat_template" else value for name, value in fields.items()}
    with pytest.raises(InvalidArgumentError) as error:
        rendered(shown + template, ChatMessage(role=USER, content="hi"), **fields)
    assert [violation.field for violation in error.value.violations] == [field]
