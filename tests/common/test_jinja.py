"""Conversations as text: what `transformers` makes of the same template is right."""

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from common.jinja import render

TEMPLATES = {
    "plain": "{{ bos }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}",
    "blocks": """
{%- set ns = namespace(seen=0, role='') %}
    {% for m in messages %}
        {% if loop.first and m.role == 'system' %}{% continue %}{% endif %}
        {% set ns.seen = ns.seen + 1 %}
    {{ ns.seen }}: {{ m['content'] | string | trim }}
        {% if ns.seen == 2 %}{% break %}{% endif %}
    {% endfor %}
    {% if add_generation_prompt %}

<assistant>{% endif %}
""",
    "tools": "{% if tools %}{{ tools | tojson }}{{ tools[0] | tojson(indent=2) }}{% endif %}{{ messages | tojson }}"
    "{{ tools | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text or part.type }}{% endfor %}{% endif %};{% endfor %}",
    "values": "{{ dict(a=1, **{'b': 'ü<&'}) | tojson }}{{ dict.fromkeys([1, 2], 'x') }}{{ documents is none }}"
    "{{ strftime_now('%Y') }}{{ missing }}{{ namespace(self=1).self }}{{ messages[-1].content }}",
    "strips": "{% for m in messages %}{{ m.content | trim }}|{% endfor %}",
}
SYSTEM, USER = {"role": "system", "content": "Be <brief> & kind."}, {"role": "user", "content": " Où? "}
MESSAGES = {
    "one": [USER],
    "more": [SYSTEM, USER, {"role": "assistant", "content": "Là, l'or"}, {"role": "user", "content": "x\n"}],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b "}, {"type": "i"}]}
    ],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "b": 1, "a": ["é", None]}}}]


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_conversation_is_what_transformers_makes_of_it(template: str, messages: str, continues: bool) -> None:
    source, said = TEMPLATES[template], MESSAGES[messages]
    for tools in (None, TOOLS):
        variables = {"bos": "<s>", "add_generation_prompt": not continues}
        try:
            ((wanted,), _) = render_jinja_template(
                [said], tools=tools, chat_template=source, continue_final_message=continues, **variables
            )
        except ValueError:
            with pytest.raises(ValueError, match="continue"):
                render(source, said, tools, variables, continues=continues)
        else:
            assert render(source, said, tools, variables, continues=continues) == wanted


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user"}], [{"role": "user", "content": [{"type": "image"}]}]], ids=["none", "empty", "i"]
)
def test_what_says_nothing_cannot_be_continued(messages: list[dict[str, object]]) -> None:
    with pytest.raises(ValueError, match="continue"):
        render(TEMPLATES["plain"], messages, None, {}, continues=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__class__.__base__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
    ],
)
def test_a_template_stays_in_the_sandbox(source: str) -> None:
    with pytest.raises(SecurityError):
        render(source, [USER], None, {})


def test_a_template_may_refuse() -> None:
    with pytest.raises(TemplateError, match="not so"):
        render("{{ raise_exception('not so') }}", [USER], None, {})
