"""Chat templates and special tokens from a model's files: what `transformers` makes of the same files is right."""

import inspect
import json
import logging

import pytest
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from fissile.errors import InternalError
from fissile.v1 import ChatMessage, ChatRequest, Tool
from router.asking.chat import render
from router.model.chat_template import CLASS_DEFAULTS, SPECIAL_TOKENS, ChatTemplate, load_template
from tests.fakes import tokenizer as fake

TEMPLATE = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{% for m in messages %}{{ m.content }}{% endfor %}"
USER = [{"role": "user", "content": "hi"}]
TOKENS_MAP = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False, "normalized": False}}
LISTED = {"1": {"content": "<s>", "special": True}, "2": {"content": "</s>", "special": True}}


def model_files(config, tokens_map=None, tokenizer=None, **files):
    contents = {
        "tokenizer.json": (tokenizer or fake.byte_fallback()).to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE} | config).encode(),
    }
    if tokens_map is not None:
        contents["special_tokens_map.json"] = json.dumps(tokens_map).encode()
    return contents | files


def rendered_by_transformers(contents, folder, tools=None):
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(USER, tools=tools, tokenize=False)


def rendered(contents, tools=()):
    request = ChatRequest(messages=[ChatMessage(role=2, content="hi")], tools=tools)
    return render(load_template(contents), request)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (model_files({"tokenizer_class": "PreTrainedTokenizerFast"}, TOKENS_MAP), "<s>|</s>||hi"),
        (model_files({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "</s>"}, TOKENS_MAP), "<s>|</s>||hi"),
        (
            model_files({"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": LISTED}, TOKENS_MAP),
            "|||hi",
        ),
        (model_files({"tokenizer_class": "LlamaTokenizer"}), "<s>|</s>|<unk>|hi"),
        (model_files({"tokenizer_class": "LlamaTokenizerFast", "bos_token": None}), "|</s>|<unk>|hi"),
        (model_files({"tokenizer_class": "LlamaTokenizer", "eos_token": "<unk>"}, {}), "<s>|<unk>|<unk>|hi"),
        (model_files({"tokenizer_class": "LlamaTokenizer"}, tokenizer=fake.byte_level()), "|||hi"),
    ],
    ids=["map", "map first", "map not looked at", "class", "class, but null", "class and config", "not that class"],
)
def test_special_tokens_are_those_of_transformers(contents, expected, tmp_path):
    assert rendered(contents) == rendered_by_transformers(contents, tmp_path) == expected


def test_a_model_may_have_tokens_of_its_own(tmp_path):
    config = {"image_token": "<s>", "extra_special_tokens": {"eot_token": "</s>"}, "add_bos_token": True}
    template = {"chat_template": "{{ image_token }}{{ eot_token }}{{ add_bos_token }}{{ messages[0].content }}"}
    contents = model_files({"tokenizer_class": "PreTrainedTokenizerFast"} | config | template)
    assert rendered(contents) == rendered_by_transformers(contents, tmp_path) == "<s></s>hi"


@pytest.mark.parametrize("name", CLASS_DEFAULTS)
def test_defaults_of_a_class_are_those_of_transformers(name):
    parameters = inspect.signature(tokenizer_class_from_name(name).__init__).parameters
    defaults = {key: parameters[key].default for key in SPECIAL_TOKENS if key in parameters}
    assert {key: str(token) for key, token in defaults.items() if token is not None} == CLASS_DEFAULTS[name]


def test_a_template_for_tools_in_a_file_of_its_own(tmp_path):
    files = {
        "chat_template.jinja": b"default hi",
        "additional_chat_templates/tool_use.jinja": b"{{ tools[0].type }} hi",
    }
    contents = model_files({"tokenizer_class": "PreTrainedTokenizerFast"}, **files)
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    assert rendered(contents, [Tool(name="f")]) == rendered_by_transformers(contents, tmp_path, [tool]) == "function hi"
    assert rendered(contents) == "default hi"


def test_where_templates_come_from():
    assert load_template({}) is None
    assert load_template({"tokenizer_config.json": b'{"chat_template": "a"}'}) == ChatTemplate("a")
    both = {"chat_template.jinja": b"b", "tokenizer_config.json": b'{"chat_template": "a", "bos_token": "B"}'}
    assert load_template(both) == ChatTemplate("b", None, {"bos_token": "B"})
    named = b'{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}'
    assert load_template({"tokenizer_config.json": named}) == ChatTemplate("d", "t")


def test_a_template_that_is_none_is_named_and_not_used(caplog):
    with caplog.at_level(logging.ERROR):
        assert load_template({"chat_template.jinja": b"a\n{{ b"}) is None
    assert "template 'default' is not used: line 2" in caplog.text


def test_a_template_nested_without_end_is_not_used(caplog):
    with caplog.at_level(logging.ERROR):
        assert load_template({"chat_template.jinja": b"{{ " + b"(" * 20_000 + b")" * 20_000 + b" }}"}) is None
    assert "nested too deeply" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json holds no JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template is neither a text nor a list"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "chat_template is neither"),
        ("tokenizer_config.json", b'{"chat_template": "a", "bos_token": 7}', "bos_token is 7; a text is needed"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read"),
    ],
)
def test_a_malformed_file_is_named(name, content, message):
    with pytest.raises(InternalError, match=message):
        load_template({name: content})


def test_a_malformed_map_of_special_tokens_is_named():
    with pytest.raises(InternalError, match=r"special_tokens_map\.json holds no JSON object"):
        load_template(model_files({}, **{"special_tokens_map.json": b"3"}))
