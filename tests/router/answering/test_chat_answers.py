"""Answers of Chat with reasoning and tool calls, end to end over a fake worker."""

import json
from dataclasses import dataclass, field

import grpc
import pytest
from tokenizers import AddedToken

from fissile.v1 import (
    BeamHypothesis,
    BeamSearch,
    ChatMessage,
    ChatRequest,
    FinishReason,
    GenerateRequest,
    GenerationOptions,
    OutputOptions,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    Tool,
    ToolChoice,
    ToolChoiceMode,
)
from router.config import RouterSettings
from router.formats.harmony import MARKERS
from router.formats.registry import FORMATS
from tests.fakes import tokenizer as toys
from tests.fakes.asked import EOS
from tests.fakes.system import collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker

USER, ASSISTANT = 2, 3
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
QWEN = "{{ messages[-1].content }}{% if add_generation_prompt %}|{{ opening }}{% endif %}{# <think> <tool_call> #}"
HARMONY = "<|start|>user<|message|>{{ messages[-1].content }}<|end|><|start|>assistant{# <|channel|> #}"


@dataclass
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Name and arguments by index."""
    ids: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: object = None
    usage: object = None
    num_messages: int = 0

    def add(self, message) -> None:
        self.num_messages += 1
        for delta in message.completions:
            self.content += delta.content
            self.reasoning += delta.reasoning
            self.tokens += delta.token_ids
            for call in delta.tool_calls:
                if call.id:
                    self.ids.append(call.id)
                    self.calls[call.index] = [call.name, ""]
                self.calls[call.index][1] += call.arguments
            if delta.HasField("finish"):
                self.finish = delta.finish
        if message.HasField("usage"):
            self.usage = message.usage

    @property
    def parts(self) -> tuple:
        return self.content, self.reasoning, list(self.calls.values())


def tokenizer_for(template):
    tokenizer = toys.byte_level(300)
    if template == HARMONY:
        tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return tokenizer


def worker_saying(text, template=QWEN, *, eos=True, **options):
    tokenizer = tokenizer_for(template)
    files = toys.files(tokenizer)
    files["tokenizer_config.json"] = json.dumps({"chat_template": template}).encode()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return FakeWorker(lambda sequence: [*ids, EOS] if eos else ids, files=files, **options)


def request(content="hi", role=USER, tools=(), output=None, continue_final_message=False, **options):
    return ChatRequest(
        messages=[ChatMessage(role=role, content=content)],
        tools=tools,
        continue_final_message=continue_final_message,
        options=GenerationOptions(output=output, **options),
    )


def ask(worker, asked=None, *, before=None, **settings) -> Answer:
    """The answer, once the system is quiet again."""
    asked = asked or request()

    async def scenario(system):
        answer = Answer()
        call = system.stub.Chat(asked)
        while (message := await call.read()) is not grpc.aio.EOF:
            if asked.options.output.cumulative:
                finish, answer = answer.finish, Answer(num_messages=answer.num_messages)
                assert finish is None
            answer.add(message)
            if before:
                await before(system, answer)
        await system.quiet()
        return answer

    workers = worker if isinstance(worker, list) else [worker]
    return run_system(scenario, *workers, **settings)


def num_tokens(text, template=QWEN):
    return len(tokenizer_for(template).encode(text, add_special_tokens=False).ids)


def test_reasoning_content_and_calls_come_in_fields_of_their_own():
    text = f"<think>\nhm\n</think>\n\nOk. {CALL}\n{CALL}"
    answer = ask(worker_saying(text), request(output=OutputOptions(token_ids=True)))
    assert answer.parts == ("Ok. ", "hm", [["f", '{"x": 1}']] * 2)
    assert len(answer.ids) == len(set(answer.ids)) == 2
    assert all(i.startswith("call_") for i in answer.ids)
    assert answer.finish.reason == FinishReason.FINISH_REASON_EOS
    assert len(answer.tokens) == answer.usage.num_completion_tokens == num_tokens(text) + 1
    assert answer.num_messages > 5


@pytest.mark.parametrize("output", [OutputOptions(cumulative=True), OutputOptions(final_only=True)])
def test_cumulative_and_final_answers(output):
    answer = ask(worker_saying(f"<think>hm</think>Ok.{CALL}"), request(output=output))
    assert answer.parts == ("Ok.", "hm", [["f", '{"x": 1}']])
    assert (answer.num_messages == 1) == output.final_only


def test_reasoning_tokens_are_counted_up_to_the_closing_tag():
    answer = ask(worker_saying("<think>hm</think>Yes"))
    assert answer.usage.num_reasoning_tokens == num_tokens("hm</think>")
    template = QWEN.replace("{{ opening }}", "<think>\n")
    answer = ask(worker_saying("hm</think>Yes", template))
    assert answer.parts == ("Yes", "hm", [])
    assert answer.usage.num_reasoning_tokens == num_tokens("hm</think>")
    answer = ask(worker_saying("hmm", template, eos=False))
    assert answer.usage.num_reasoning_tokens == answer.usage.num_completion_tokens == num_tokens("hmm")
    assert ask(worker_saying("Yes")).usage.num_reasoning_tokens == 0


@pytest.mark.parametrize("tokens_per_step", [1, 4, 1000])
def test_several_tokens_a_step_change_nothing(tokens_per_step):
    worker = worker_saying(f"<think>hm</think>Yes{CALL}", tokens_per_step=tokens_per_step)
    answer = ask(worker)
    assert answer.parts == ("Yes", "hm", [["f", '{"x": 1}']])
    assert answer.usage.num_reasoning_tokens == num_tokens("hm</think>")


def test_stop_strings_end_at_content_alone():
    call = CALL.replace("1", '"STOP"')
    text = f"<think>1 STOP 2</think>a{call}b STOP c"
    answer = ask(worker_saying(text), request(stop=["STOP"], output=OutputOptions(token_ids=True)))
    assert answer.parts == ("ab ", "1 STOP 2", [["f", '{"x": "STOP"}']])
    assert answer.finish.reason == FinishReason.FINISH_REASON_STOP_STRING
    assert answer.finish.stop == "STOP"
    assert len(answer.tokens) == answer.usage.num_completion_tokens == num_tokens(text.removesuffix(" c"))


def test_a_stop_string_that_the_parser_held_back_to_the_end():
    answer = ask(worker_saying("ab<", eos=False), request(stop=["b<"]))
    assert answer.content == "a"
    assert answer.finish.reason == FinishReason.FINISH_REASON_STOP_STRING


def test_a_stop_string_across_a_call():
    answer = ask(worker_saying(f"aST{CALL}OPb"), request(stop=["STOP"], include_stop=True))
    assert answer.parts == ("aSTOP", "", [["f", '{"x": 1}']])


def test_a_call_cut_off_by_max_tokens_is_content():
    max_tokens = num_tokens('<tool_call>\n{"name": ')
    answer = ask(worker_saying(CALL), request(max_tokens=max_tokens))
    assert answer.parts == ('<tool_call>\n{"name": ', "", [])
    assert answer.finish.reason == FinishReason.FINISH_REASON_LENGTH


def test_harmony_sees_its_special_tokens_and_its_end_has_no_text():
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"x": 1}'
    )
    call_token = tokenizer_for(HARMONY).token_to_id("<|call|>")
    worker = worker_saying(text + "<|call|>", HARMONY, eos=False)
    answer = ask(worker, request(stop_token_ids=[call_token]))
    assert answer.parts == ("", "hm", [["f", '{"x": 1}']])
    assert answer.finish.reason == FinishReason.FINISH_REASON_STOP_TOKEN
    assert answer.usage.num_reasoning_tokens == num_tokens("hm<|end|>", HARMONY)
    included = request(stop_token_ids=[call_token], include_stop=True)
    assert ask(worker_saying(text + "<|call|>", HARMONY, eos=False), included).parts == answer.parts


def test_special_tokens_that_are_no_markers_stay_hidden():
    text = "<|channel|>final<|message|>a<|im_start|>b<|return|>"
    assert ask(worker_saying(text, HARMONY)).content == "ab"


def test_the_text_as_it_is_for_who_wants_to_see_special_tokens():
    text = "<|channel|>final<|message|>a"
    answer = ask(worker_saying(text, HARMONY), request(skip_special_tokens=False))
    assert answer.parts == (text, "", [])
    text = f"<think>hm</think>{CALL}"
    assert ask(worker_saying(text), request(skip_special_tokens=False)).parts == (text, "", [])


def test_the_setting_goes_before_the_template():
    text = f"<think>hm</think>{CALL}"
    assert ask(worker_saying(text), chat_format="none").parts == (text, "", [])
    assert ask(worker_saying(text), chat_format="hermes").parts == ("<think>hm</think>", "", [["f", '{"x": 1}']])
    plain = worker_saying(text, "{{ messages[0].content }}")
    assert ask(plain).parts == (text, "", [])
    assert ask(plain, chat_format="qwen3").parts == ("", "hm", [["f", '{"x": 1}']])


def test_every_format_can_be_set():
    choices = RouterSettings.model_fields["chat_format"].annotation.__args__
    assert set(choices) == {"auto", "none", *FORMATS}


def test_the_schema_of_a_tool_reaches_the_parser():
    template = "{{ messages[0].content }}{{ tools }}{# <tool_call> <arg_key> #}"
    text = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    tool = Tool(name="f", parameters='{"type": "object", "properties": {"x": {"type": "string"}}}')
    assert ask(worker_saying(text, template), request(tools=[tool])).parts == ("", "", [["f", '{"x": "1"}']])
    assert ask(worker_saying(text, template)).parts == ("", "", [["f", '{"x": 1}']])


WITH_TOOLS = "{{ tools | tojson if tools }}" + QWEN.replace("{{ opening }}", "<think>\n")


def held_to(worker) -> list[str]:
    """The constraints that the worker was asked to hold the answer to."""
    composite = worker.received[0].sampling.structured_output.composite
    return [part.constraint.WhichOneof("constraint") for part in composite.parts]


def test_structured_output_of_a_model_that_thinks_is_the_content():
    """The prompt has opened the reasoning; the constraint holds for what comes after it."""
    worker = worker_saying('hm</think>\n\n{"x": 1}', WITH_TOOLS)
    asked = request(sampling=SamplingParams(structured_output=StructuredOutput(json_object=True)))
    assert ask(worker, asked).parts == ('{"x": 1}', "hm", [])
    assert held_to(worker) == ["json_object"]


@pytest.mark.parametrize("mode", [ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED, ToolChoiceMode.TOOL_CHOICE_MODE_AUTO])
def test_calls_are_held_to_the_schemas_of_their_tools(mode):
    worker = worker_saying(f"hm</think>\n\n{CALL}", WITH_TOOLS)
    asked = request(tools=[Tool(name="g"), Tool(name="f")])
    asked.tool_choice.CopyFrom(ToolChoice(mode=mode, names=["f"]))
    assert ask(worker, asked).parts == ("", "hm", [["f", '{"x": 1}']])
    assert held_to(worker) == ["json_schema"]


def test_what_the_worker_does_not_take_of_a_tool_is_named():
    refusal = RequestOutput(
        finish_reason=FinishReason.FINISH_REASON_ERROR,
        error_code=3,
        field="sampling.structured_output.composite",
        detail="part_0: Unimplemented keys",
    )
    asked = request(tools=[Tool(name="g"), Tool(name="f", parameters='{"not": {}}')])
    asked.tool_choice.CopyFrom(ToolChoice(mode=ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED, names=["f"]))

    async def scenario(system):
        return await error_of(collect(system.stub.Chat(asked)))

    error = run_system(scenario, worker_saying("x", WITH_TOOLS, refuse=refusal))
    assert [(v.field, v.description) for v in error.violations] == [("tools[1].parameters", "Unimplemented keys")]


def test_a_continued_message():
    asked = request("<think>h", ASSISTANT, continue_final_message=True)
    assert ask(worker_saying("m</think>Yes"), asked).parts == ("Yes", "m", [])


def test_a_template_of_the_request_tells_the_format():
    asked = request()
    asked.chat_template = "{{ messages[0].content }}"
    text = "<think>hm</think>Yes"
    assert ask(worker_saying(text), asked, allow_chat_template=True).parts == (text, "", [])


def test_each_answer_has_calls_of_its_own():
    answers = {}

    async def scenario(system):
        async for message in system.stub.Chat(request(n=2)):
            for delta in message.completions:
                answers.setdefault(delta.index, Answer()).add(type(message)(completions=[delta]))
        return message.usage

    usage = run_system(scenario, worker_saying(f"<think>hm</think>{CALL}"))
    assert answers[0].parts == answers[1].parts == ("", "hm", [["f", '{"x": 1}']])
    assert answers[0].ids != answers[1].ids
    assert usage.num_reasoning_tokens == 2 * num_tokens("hm</think>")


@pytest.mark.parametrize("piece", ["hm", '{"x"'])
def test_a_lost_worker_changes_nothing(piece):
    """The second worker goes on in the midst of the reasoning or of a call."""
    text = f"<think>hm, let me think</think>Yes{CALL}"
    done = num_tokens(text[: text.index(piece) + len(piece)])
    workers = [worker_saying(text, mute_after=done), worker_saying(text, mute_after=done)]

    async def lose(system, answer):
        working = [worker for worker in workers if worker.running]
        if answer.finish is None and len([w for w in workers if w.received]) == 1 and working:
            await until(lambda: working[0].num_emitted >= done)
            other = next(w for w in workers if w is not working[0])
            other.mute_after = None
            await working[0].kill()

    answer = ask(workers, before=lose)
    assert [len(w.received) for w in workers] == [1, 1]
    assert answer.parts == ("Yes", "hm, let me think", [["f", '{"x": 1}']])
    assert len(answer.ids) == 1
    assert answer.usage.num_reasoning_tokens == num_tokens("hm, let me think</think>")


def test_hypotheses_of_beam_search_are_read_as_any_answer():
    ids = tokenizer_for(QWEN).encode(f"<think>hm</think>Yes{CALL}", add_special_tokens=False).ids
    eos, length = FinishReason.FINISH_REASON_EOS, FinishReason.FINISH_REASON_LENGTH
    best = BeamHypothesis(token_ids=[*ids, EOS], score=-0.5, finish_reason=eos)
    second = BeamHypothesis(token_ids=ids, score=-0.75, finish_reason=length)
    result = RequestOutput(finish_reason=length, hypotheses=[best, second])
    worker = worker_saying("x", refuse=result, capabilities=["beam_search"])
    answer = ask(worker, request(sampling=SamplingParams(beam_search=BeamSearch(width=2))))
    assert answer.parts == ("Yes", "hm", [["f", '{"x": 1}']])
    assert answer.finish.reason == eos
    assert answer.usage.num_reasoning_tokens == num_tokens("hm</think>")


def test_generate_never_parses():
    text = f"<think>hm</think>{CALL}"

    async def scenario(system):
        return await system.ask(GenerateRequest(text="x"))

    answer = run_system(scenario, worker_saying(text))
    assert answer.text == text
    assert answer.usage.num_reasoning_tokens == 0


def test_without_text_there_are_no_parts_but_their_count():
    answer = ask(worker_saying(f"<think>hm</think>{CALL}"), request(output=OutputOptions(text=False, token_ids=True)))
    assert answer.parts == ("", "", [])
    assert answer.usage.num_reasoning_tokens == num_tokens("hm</think>")
