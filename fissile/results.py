"""What the client library returns. Plain dataclasses: durations are seconds, text is `str`, ids are `int`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fissile.requests import Message

FINISH_REASONS = (
    "eos",
    "stop_token",
    "stop_sequence",
    "stop_string",
    "length",
    "model_length",
    "aborted",
    "deadline",
    "error",
)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token: natural logarithm, under the model's own distribution."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    text: bytes
    """Bytes, because a token may be part of a character."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a completion ended."""

    reason: str
    """One of FINISH_REASONS."""
    stop: str | None = None
    """The stop string that was hit."""
    stop_token_id: int | None = None
    detail: str = ""
    score: float | None = None
    """Beam search: the normalised score."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model wants."""

    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A new part of a tool call. Joined arguments of one index are the arguments of the whole."""

    index: int
    id: str = ""
    """Set in the first part."""
    name: str = ""
    """Set in the first part."""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one completion of a stream. Joined texts of one completion equal the text of the whole."""

    index: int
    text: str
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    """Filled when the call asked for `return_token_ids`."""
    logprobs: tuple[tuple[Logprob, ...], ...] = ()
    """For each new token: the chosen one first, then the most likely ones."""
    finish: Finish | None = None
    """Set in the last delta of the completion."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt_index: int = 0
    """With several prompts: which one."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion."""

    index: int
    text: str
    finish: Finish
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[Logprob, ...], ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_index: int = 0
    """With several prompts: which one."""

    def message(self) -> "Message":
        """It as the next message of the conversation that it answers."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "name": call.name, "arguments": call.arguments} for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the whole request. Those that were found in a cache are prompt tokens, those of reasoning completion
    tokens, too."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Latency as the router measured it, in seconds. None: does not apply (tpot of a single token)."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    worker_queued: float | None = None
    max_itl: float | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request."""

    request_id: str
    completions: tuple[Completion, ...]
    """In order of prompt, then of index."""
    usage: Usage
    timings: Timings
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[tuple[Logprob, ...], ...] = ()

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """Workers of a model that are alike."""

    name: str
    """What its operator calls it; may be empty."""
    tokenizer_fingerprint: str
    model_fingerprint: str
    dtype: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    num_workers: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the router serves. Of several versions, `max_model_len` is that of the one with the longest context,
    the rest that of the first."""

    id: str
    architectures: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    num_workers: int
    default_sampling: dict[str, object]
    """By option, in the form that it has there: what holds for requests that do not give it."""
    aliases: tuple[str, ...] = ()
    """Other names that requests may use."""
    versions: tuple[ModelVersion, ...] = ()
    """Its workers may differ; the version that most have comes first."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a tokenised text."""

    id: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of a latency in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the router sees it."""

    address: str
    healthy: bool
    detail: str
    num_open_requests: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_generated_tokens: int
    """Since its start, as are the next four."""
    num_prefix_queries: int
    """Prompt tokens looked up in its prefix cache."""
    num_prefix_hits: int
    """Of these, found there."""
    num_draft_tokens: int
    """Tokens that speculation has drafted."""
    num_accepted_tokens: int
    """Of these, right."""
    model: str
    """Empty as long as it was never reached."""
    model_version: str
    """What its operator calls it; may be empty."""
    epoch: str
    """Another one after each start."""
    ttft: Quantiles
    tpot: Quantiles


@dataclass(frozen=True, slots=True)
class Stats:
    """What a router saw; counters since its start, quantiles over the window that was asked for."""

    ttft: Quantiles
    tpot: Quantiles
    itl: Quantiles
    e2e: Quantiles
    num_open_requests: int
    finished: dict[str, int]
    """Requests by finish reason or gRPC status."""
    num_prompt_tokens: int
    num_completion_tokens: int
    workers: tuple[Worker, ...]
    uptime: float
    num_queued_requests: int
    """Of the open ones, those that wait for room on a worker."""
