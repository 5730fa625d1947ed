"""A chat template in a file: what is none is refused by name; what is one replaces all that a model has."""

import json

import pytest

from common.chat_template import read_chat_template, with_chat_template
from fissile.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a\n\n{% if x %}", "template.jinja, line 3: Unexpected end of template"),
        (b"a\n{% nonsense %}", "template.jinja, line 2: Encountered unknown tag 'nonsense'"),
        (b"ok \xff", "template.jinja: no UTF-8 at byte 3"),
        (b" \n", "template.jinja: is empty"),
        (None, "template.jinja: No such file or directory"),
    ],
)
def test_what_is_no_template_is_refused_by_file_and_line(tmp_path, content, said):
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgumentError) as raised:
        read_chat_template(path)
    assert said in raised.value.message


def test_what_transformers_adds_to_jinja_may_be_used(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{% generation %}{% for m in messages %}{% break %}{% endfor %}{% endgeneration %}")
    assert read_chat_template(path) == path.read_text()


def test_it_replaces_all_templates_of_a_model():
    files = {
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"old",
        "additional_chat_templates/tool_use.jinja": b"old",
        "tokenizer_config.json": b'{"chat_template": [{"name": "tool_use", "template": "old"}], "eos_token": "e"}',
    }
    replaced = with_chat_template(files, "new")
    assert json.loads(replaced.pop("tokenizer_config.json")) == {"eos_token": "e"}
    assert replaced == {"tokenizer.json": b"{}", "chat_template.jinja": b"new"}
    assert with_chat_template({"tokenizer_config.json": b"no json"}, "new")["tokenizer_config.json"] == b"no json"
