"""Rules on several fields of a request at once."""

from collections.abc import Iterator

from google.protobuf.message import Message

from common import bounds
from fissile.errors import FieldViolation
from fissile.v1 import ChatRequest, GenerateRequest, GenerationOptions, SamplingParams, ToolChoiceMode
from router.asking.answer_grammar import holds_calls
from router.asking.checks import Limits


def broken_together(request: Message, limits: Limits) -> Iterator[FieldViolation]:
    if isinstance(request, GenerateRequest):
        yield from _prompts(request)
    elif isinstance(request, ChatRequest):
        if request.options.sampling.HasField("num_prompt_logprobs"):
            yield FieldViolation("options.sampling.num_prompt_logprobs", "Chat has none; use Generate")
        yield from _tool_choice(request)
    else:
        return
    yield from _beam_search(request.options)
    yield from _structured_output(request.options)
    yield from _token_choice(request.options.sampling, limits)
    yield from _lengths(request.options)


def _prompts(request: GenerateRequest) -> Iterator[FieldViolation]:
    has_one = request.WhichOneof("prompt") is not None
    if not request.prompts:
        if not has_one:
            yield FieldViolation("text", "a prompt is needed: text, tokens or prompts")
        return
    if has_one:
        yield FieldViolation("prompts", "must be empty when text or tokens is set")
    for i, prompt in enumerate(request.prompts):
        if prompt.WhichOneof("prompt") is None:
            yield FieldViolation(f"prompts[{i}].text", "a prompt is needed: text or tokens")
    if len(request.prompts) == 1:
        return
    # A response has one list for these, and does not say of which prompt it is.
    if request.options.output.prompt_token_ids:
        yield FieldViolation("options.output.prompt_token_ids", "must be false with several prompts")
    if request.options.sampling.HasField("num_prompt_logprobs"):
        yield FieldViolation("options.sampling.num_prompt_logprobs", "must be unset with several prompts")


def _tool_choice(request: ChatRequest) -> Iterator[FieldViolation]:
    choice, options = request.tool_choice, request.options
    if choice.mode == ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED and not request.tools:
        yield FieldViolation("tools", "must not be empty where a call is required")
    known = {tool.name for tool in request.tools}
    for i, name in enumerate(choice.names):
        if name not in known:
            yield FieldViolation(f"tool_choice.names[{i}]", f"is none of the tools: {name!r}")
    if not request.tools or not holds_calls(choice):
        return
    excluded = {
        "options.sampling.beam_search": options.sampling.HasField("beam_search"),
        "options.ignore_eos": options.ignore_eos,
        "options.min_tokens": bool(options.min_tokens),
        "continue_final_message": request.continue_final_message,
    }
    for path, is_set in excluded.items():
        if is_set:
            yield FieldViolation(path, "cannot go with a tool_choice that calls are held to")


def _beam_search(options: GenerationOptions) -> Iterator[FieldViolation]:
    sampling = options.sampling
    if not sampling.HasField("beam_search"):
        return
    width = sampling.beam_search.width
    if width in bounds.BEAM_WIDTH and options.n > width:
        yield FieldViolation("options.n", f"must not exceed the beam width {width}, is {options.n}")
    if options.stop:
        yield FieldViolation("options.stop", "beam search has no stop strings; use stop_token_ids")
    excluded = [f"sampling.{name}" for name in bounds.excluded_by_beams(sampling)]
    for path in [*excluded, "bad_words"] if options.bad_words else excluded:
        yield FieldViolation(f"options.{path}", "cannot go with beam search")


def _structured_output(options: GenerationOptions) -> Iterator[FieldViolation]:
    """The grammar decides when an output is complete."""
    if not options.sampling.HasField("structured_output"):
        return
    if options.ignore_eos:
        yield FieldViolation("options.ignore_eos", "must be false with structured_output")
    if options.min_tokens:
        yield FieldViolation("options.min_tokens", f"must be 0 with structured_output, is {options.min_tokens}")


def _token_choice(sampling: SamplingParams, limits: Limits) -> Iterator[FieldViolation]:
    """Some token must be left."""
    if not sampling.banned_token_ids and not sampling.bad_token_sequences:
        return
    banned = set(sampling.banned_token_ids)
    banned.update(sequence.token_ids[0] for sequence in sampling.bad_token_sequences if len(sequence.token_ids) == 1)
    if sampling.allowed_token_ids and banned.issuperset(sampling.allowed_token_ids):
        yield FieldViolation("options.sampling.allowed_token_ids", "all of them are banned")
    elif len(banned) >= limits.vocab_size:
        yield FieldViolation("options.sampling.banned_token_ids", f"all {limits.vocab_size} tokens are banned")


def _lengths(options: GenerationOptions) -> Iterator[FieldViolation]:
    if options.HasField("max_tokens") and options.min_tokens > options.max_tokens:
        yield FieldViolation(
            "options.min_tokens", f"must not exceed max_tokens {options.max_tokens}, is {options.min_tokens}"
        )
