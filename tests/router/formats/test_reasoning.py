"""Where reasoning begins and ends."""

import pytest

from tests.router.formats.answers import Answer, parser, read


@pytest.mark.parametrize("prompt", ["assistant\n<think>\n", "<｜Assistant｜><think>", "<think> \n\n"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek", "glm"])
def test_reasoning_that_the_prompt_opened(name, prompt):
    assert parser(name, prompt).is_reasoning
    assert read(name, "hm</think>Yes", prompt=prompt) == Answer("Yes", "hm")


def test_an_opening_tag_after_one_in_the_prompt_is_no_text():
    assert read("qwen3", "<think>\nhm\n</think>\n\nYes", prompt="<think>\n") == Answer("Yes", "hm")


@pytest.mark.parametrize(
    "prompt", ["<think>\n\n</think>\n\n", "<｜Assistant｜></think>", "<think> is a tag\nassistant\n"]
)
def test_prompts_that_opened_no_reasoning(prompt):
    assert not parser("qwen3", prompt).is_reasoning
    assert read("qwen3", "Yes", prompt=prompt) == Answer("Yes")


def test_a_continued_message_says_whether_it_is_in_its_reasoning():
    assert read("qwen3", "m</think>Yes", prompt="…<think>\nh", continued="<think>\nh") == Answer("Yes", "m")
    assert read("qwen3", "s", prompt="<think>", continued="<think>a</think>Ye") == Answer("s")
    assert read("qwen3", "s", prompt="<think>", continued="Ye") == Answer("s")


def test_line_ends_around_the_reasoning_are_no_text():
    assert read("qwen3", "<think>\n\n\nhm\n\n\n</think>\n\n\nYes") == Answer("\nYes", "\nhm\n")
    reader = parser("qwen3", "<think>")
    texts = ["".join(e.text for e in reader.feed(piece)) for piece in ("a", "\n", "\n", "\n", "b")]
    assert texts == ["a", "", "", "\n", "\n\nb"]


def test_a_tag_that_closes_nothing_is_text():
    assert read("qwen3", "Ye</think>s") == Answer("Ye</think>s")


def test_tags_after_the_reasoning_are_text():
    assert read("qwen3", "Use <think> for it") == Answer("Use <think> for it")
    assert read("qwen3", "<think>a</think>b<think>c</think>") == Answer("b<think>c</think>", "a")


def test_a_call_inside_of_reasoning_is_reasoning():
    text = "I write <tool_call> now"
    assert read("qwen3", f"<think>{text}</think>ok") == Answer("ok", text)


def test_reasoning_that_is_cut_off_keeps_all_of_it():
    assert read("qwen3", "<think>\nhm\n</thi") == Answer("", "hm\n</thi")
    assert read("qwen3", "<thi") == Answer("<thi")
    assert read("qwen3", "\n", prompt="<think>\n") == Answer("", "\n")


def test_hermes_does_not_think():
    assert read("hermes", "<think>a</think>", prompt="<think>") == Answer("<think>a</think>")


def test_whether_the_answer_is_in_its_reasoning():
    reader = parser("qwen3")
    states = []
    for piece in ("<thi", "nk>", "\n", "hm", "\n</", "think>", "\n", "Yes"):
        states.append(reader.is_reasoning)
        reader.feed(piece)
    assert states == [False, False, True, True, True, True, False, False]
