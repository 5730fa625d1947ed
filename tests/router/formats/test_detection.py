"""The chat template tells the format."""

import pytest

from router.formats.registry import detect


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", "harmony"),
        ("{{ '<think>\n' }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
        ("<tool_call>{name}\n<arg_key> <think></think>", "glm"),
        ("<tool_call>{{ '<think>\n\n</think>' }}", "qwen3"),
        ("{{ content.split('</think>') }}", "qwen3"),
        ("<tool_call>\n<function=name>", "hermes"),
        ("<|im_start|>{{ message.content }}", None),
        ("", None),
    ],
)
def test_the_template_tells_the_format(template, name):
    found = detect(template)
    assert (found and found.name) == name
