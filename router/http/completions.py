"""POST /v1/completions: GenerateResponse as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fissile.v1 import CompletionDelta, GenerateResponse, TokenLogprob, TokenLogprobs
from router.http.answers import Envelope, Json, finish_reason, usage_json
from router.http.logprobs import CompletionLogprobs

KIND = "text_completion"


@dataclass(slots=True)
class Echo:
    """The prompts, to stand in front of what is generated."""

    texts: Sequence[str]
    """One a prompt."""
    first_token: bytes = b""
    """With log probabilities: the text of the prompt's first token, which has none."""


@dataclass(slots=True)
class _Choice:
    """What a stream has to remember of one choice."""

    logprobs: CompletionLogprobs = field(default_factory=CompletionLogprobs)
    has_begun: bool = False


@dataclass(slots=True)
class CompletionWriter:
    """`n` choices a prompt, in the order of the prompts."""

    envelope: Envelope
    n: int = 1
    num_logprobs: int | None = None
    echo: Echo | None = None
    _prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    _choices: dict[int, _Choice] = field(default_factory=dict)

    def chunks(self, message: GenerateResponse) -> Iterator[Json]:
        self._read_prompt(message)
        for delta in message.completions:
            yield self.envelope.chunk(KIND, self._choice(delta))
        if message.HasField("usage") and self.envelope.includes_usage:
            yield self.envelope.around(KIND, [], usage_json(message.usage))

    def whole(self, message: GenerateResponse) -> Json:
        self._read_prompt(message)
        choices = sorted((self._choice(delta) for delta in message.completions), key=lambda choice: choice["index"])
        return self.envelope.around(KIND, choices, usage_json(message.usage))

    def _read_prompt(self, message: GenerateResponse) -> None:
        """What only an echo shows comes in the first message or, where it is long, in the first ones."""
        if self.echo and message.prompt_token_ids:
            first = TokenLogprob(token_id=message.prompt_token_ids[0], text=self.echo.first_token)
            self._prompt_logprobs.append(TokenLogprobs(logprobs=[first]))
        self._prompt_logprobs += message.prompt_logprobs

    def _choice(self, delta: CompletionDelta) -> Json:
        index = delta.prompt_index * self.n + delta.index
        choice = self._choices.setdefault(index, _Choice())
        text, logprobs = delta.text, list(delta.logprobs)
        if self.echo and not choice.has_begun:
            text = self.echo.texts[delta.prompt_index] + text
            logprobs = self._prompt_logprobs + logprobs
        choice.has_begun = True
        return {
            "index": index,
            "text": text,
            "logprobs": None if self.num_logprobs is None else choice.logprobs.feed(logprobs, self.num_logprobs),
            "finish_reason": finish_reason(delta.finish) if delta.HasField("finish") else None,
        }
