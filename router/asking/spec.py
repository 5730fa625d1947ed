"""What was asked, with every default filled in, and the group of sequences that a worker gets for it."""

from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from fissile.v1 import SamplingParams, Sequence, SequenceGroup, TokenSequence
from router.asking.answer_grammar import AnswerGrammar
from router.formats.registry import Reading
from router.model.served import Version


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to continue."""

    field: str
    """Path of the field that they came from."""
    token_ids: List[int]
    reading: Reading | None = None
    """How the answers to a conversation are read; None: they are text."""
    grammar: AnswerGrammar | None = None
    """What they are held to; None: what the request's own options say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """What of a completion is sent, how tokens become text and when text ends it."""

    send_text: bool = True
    send_token_ids: bool = False
    send_logprobs: bool = False
    stops: tuple[str, ...] = ()
    special_stops: Mapping[int, str] = field(default_factory=dict)
    """Stop strings that are special tokens: the worker ends there, as they may have no text."""
    include_stop: bool = False
    min_tokens: int = 0
    """No stop string ends a completion that has fewer tokens."""
    reading: Reading | None = None
    """How text is sorted into content, reasoning and tool calls; None: all of it is content."""

    @property
    def shown_tokens(self) -> frozenset[str]:
        """Special tokens that must be in the text."""
        return self.reading.format.markers if self.reading else frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One prompt and everything about its completions."""

    request_id: str
    model: str
    version: Version
    """Of the model: what the prompt was made for."""
    prompt: Prompt
    n: int
    sampling: SamplingParams
    """Without a seed."""
    seed: int
    """Of the first completion."""
    max_tokens: int | None
    """None: what context and cache of the worker leave."""
    text: TextRules
    stop_token_ids: List[int] = ()
    stop_token_sequences: List[TokenSequence] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: bytes = b""
    routing_key: str = ""
    dp_rank: int | None = None
    send_prompt: bool = False
    cumulative: bool = False
    final_only: bool = False
    heartbeat: float | None = None
    """Seconds."""

    @property
    def is_beam_search(self) -> bool:
        return self.sampling.HasField("beam_search")

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.HasField("num_prompt_logprobs")

    def is_meant_for(self, version: Version) -> bool:
        """The one that was chosen, or one that differs from it in nothing that this request can notice."""
        return version.name == self.version.name and self.may_go_to(version, has_begun=True)

    def may_go_to(self, version: Version, *, has_begun: bool) -> bool:
        """Whether workers of another version than its own may take it. What has begun must go on token for token. It
        needs as much context as it may take where it is: `max_tokens` ends with the context at the latest."""
        is_like = version.continues(self.version) if has_begun else version.reads_like(self.version)
        own = self.version.max_model_len
        num_needed = own if self.max_tokens is None else min(own, self.num_tokens_asked)
        is_able = not self.is_beam_search or "beam_search" in version.capabilities
        return is_like and is_able and version.max_model_len >= num_needed

    @property
    def num_tokens_asked(self) -> int:
        """Prompt and completion, if all of it comes; without `max_tokens`, one token."""
        return len(self.prompt.token_ids) + (1 if self.max_tokens is None else self.max_tokens)

    def group(
        self, generated: Mapping[int, List[int]], *, asks_prompt_logprobs: bool, deadline: float | None
    ) -> SequenceGroup:
        """For the completions with these indices, each going on behind its tokens so far. `deadline`: seconds left."""
        group = SequenceGroup(
            request_id=self.request_id,
            prompt_token_ids=self.prompt.token_ids,
            sampling=self.sampling,
            stop_token_ids=self.stop_token_ids,
            stop_token_sequences=self.stop_token_sequences,
            max_tokens=self.max_tokens,
            min_tokens=self.text.min_tokens,
            ignore_eos=self.ignore_eos,
            deadline_ms=None if deadline is None else max(0, int(deadline * 1000)),
            priority=self.priority,
            cache_salt=self.cache_salt,
            sequences=[
                Sequence(index=index, seed=(self.seed + index) % 2**64, token_ids=token_ids)
                for index, token_ids in generated.items()
            ],
        )
        if not asks_prompt_logprobs:
            group.sampling.ClearField("num_prompt_logprobs")
        return group
