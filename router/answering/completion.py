"""One completion of a request: its tokens, its text, its end, and what the client has not seen yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from fissile.errors import InternalError, InvalidArgumentError
from fissile.v1 import (
    BeamHypothesis,
    Finish,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    TokenLogprobs,
    ToolCallDelta,
)
from router.answering.logprobs import TokenBytes
from router.answering.pending_calls import PendingCalls
from router.answering.pending_logprobs import PendingLogprobs
from router.answering.stop_strings import StopMatcher
from router.asking.spec import TextRules
from router.formats.events import Content, Event, Reasoning
from router.model.detokenizer import Detokenizer

_ENDING_TOKEN = {FinishReason.FINISH_REASON_EOS, FinishReason.FINISH_REASON_STOP_TOKEN}
"""Reasons whose last token is no part of the text."""

MAX_CUMULATIVE_ENTRIES = 65_536
"""Of log probabilities in one completion of a message that has everything so far."""


class TokenGapError(Exception):
    """An output begins after the tokens that are there: some got lost on the way."""


@dataclass(slots=True)
class Delta:
    """What is new in a completion. `finish` is set once."""

    index: int
    text: str
    """Content only, where the text is sorted."""
    reasoning: str
    tool_calls: list[ToolCallDelta]
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: Finish | None
    prompt_index: int = 0


class Completion:
    """Fed by the worker link, emptied by the request's handler; both on the event loop."""

    def __init__(self, index: int, rules: TextRules, detokenizer: Detokenizer, token_bytes: TokenBytes) -> None:
        self.index = index
        self.token_ids: list[int] = []
        """Up to and including the one that ended it."""
        self.finish: Finish | None = None
        self.has_news = False
        """There is something to send that was not sent yet."""
        self.num_reasoning_tokens = 0
        """Up to and including the one that closed the reasoning; the one that opened it is none."""
        self._rules = rules
        self._detokenizer = detokenizer
        self._parser = rules.reading.parser() if rules.reading else None
        self._matcher = StopMatcher(rules.stops, include_stop=rules.include_stop)
        self._pending_text: list[str] = []
        self._pending_reasoning: list[str] = []
        self._pending_calls = PendingCalls()
        self._pending_ids: list[int] = []
        self._pending_logprobs = PendingLogprobs(token_bytes)

    @property
    def num_entries(self) -> int:
        """Of log probabilities that were not sent yet."""
        return self._pending_logprobs.num_entries

    def take(self, *, cumulative: bool, max_entries: int) -> Delta:
        """What is new, or with `cumulative` everything so far, but no more entries of log probabilities than that: then
        there is still news, and text, tool calls and the end are in the last delta. Call it when there is news. Raises
        InvalidArgumentError where too much is `cumulative`."""
        if cumulative:
            return self._take_all_so_far()
        if self.num_entries > max_entries:
            return self._take_piece(self._pending_logprobs.num_within(max_entries))
        self.has_news = False
        delta = Delta(
            self.index,
            "".join(self._pending_text),
            "".join(self._pending_reasoning),
            self._pending_calls.take(cumulative=False),
            self._pending_ids,
            self._pending_logprobs.take(len(self._pending_logprobs)),
            self.finish,
        )
        self._pending_text, self._pending_reasoning, self._pending_ids = [], [], []
        return delta

    def _take_piece(self, num_tokens: int) -> Delta:
        token_ids = self._pending_ids[:num_tokens]
        del self._pending_ids[:num_tokens]
        return Delta(self.index, "", "", [], token_ids, self._pending_logprobs.take(num_tokens), None)

    def _take_all_so_far(self) -> Delta:
        if self.num_entries > MAX_CUMULATIVE_ENTRIES:
            raise InvalidArgumentError.of(
                "options.output.cumulative", "what there is so far is too large for one message"
            )
        self.has_news = False
        text, reasoning = "".join(self._pending_text), "".join(self._pending_reasoning)
        calls = self._pending_calls.take(cumulative=True)
        logprobs = self._pending_logprobs.read(len(self._pending_logprobs))
        self._pending_text, self._pending_reasoning = [text], [reasoning]
        return Delta(self.index, text, reasoning, calls, self._pending_ids.copy(), logprobs, self.finish)

    def accept(self, output: RequestOutput, max_tokens: int | None) -> None:
        """Add an output's tokens and end. Repeated tokens are dropped. Raises TokenGapError on missing ones, and
        InternalError on more than were asked for."""
        if self.finish:
            return
        new: Sequence[int] = output.token_ids
        logprobs = self._logprobs_of(output) if self._rules.send_logprobs else ()
        repeated = len(self.token_ids) - output.token_offset
        if new and repeated < 0:
            raise TokenGapError(f"expected token {len(self.token_ids)}, got {output.token_offset}")
        if repeated > 0:
            new, logprobs = new[repeated:], logprobs[repeated:]
        if max_tokens is not None and len(self.token_ids) + len(new) > max_tokens:
            raise InternalError(
                f"the worker sent {len(self.token_ids) + len(new)} tokens for max_tokens = {max_tokens}"
            )
        num_text = len(new)
        finish_reason = output.finish_reason
        if finish_reason in _ENDING_TOKEN and not self._rules.include_stop:
            num_text = max(0, num_text - 1)
        if not self._add(new, num_text, logprobs) and finish_reason:
            self._end(output)

    def _logprobs_of(self, output: RequestOutput) -> Sequence[PositionLogprobs]:
        if len(output.logprobs) != len(output.token_ids):
            raise InternalError(f"the worker sent {len(output.logprobs)} logprobs for {len(output.token_ids)} tokens")
        return output.logprobs

    def accept_hypothesis(self, hypothesis: BeamHypothesis) -> None:
        """The whole completion at once, from beam search."""
        tokens = hypothesis.token_ids
        hides_last = hypothesis.finish_reason in _ENDING_TOKEN and not self._rules.include_stop
        self._add(tokens, len(tokens) - hides_last, ())
        self._flush()
        self._finish(Finish(reason=hypothesis.finish_reason, score=hypothesis.score))

    def _add(self, token_ids: Sequence[int], num_text: int, logprobs: Sequence[PositionLogprobs]) -> bool:
        """Append tokens; the first `num_text` have text. True when a stop string ended the completion."""
        rules = self._rules
        if rules.stops or self._parser:
            return self._add_one_by_one(token_ids, num_text, logprobs)
        self._keep(token_ids, logprobs)
        if rules.send_text:
            self._show(self._detokenizer.feed(token_ids[:num_text]))
        return False

    def _add_one_by_one(self, token_ids: Sequence[int], num_text: int, logprobs: Sequence[PositionLogprobs]) -> bool:
        for position, token_id in enumerate(token_ids):
            self._keep((token_id,), logprobs[position : position + 1])
            if position >= num_text:
                break
            if self._parser:
                self.num_reasoning_tokens += self._parser.is_reasoning
            if self._read(self._detokenizer.feed((token_id,)), armed=self._is_armed):
                return True
        return False

    @property
    def _is_armed(self) -> bool:
        """A stop string may end it."""
        return len(self.token_ids) >= self._rules.min_tokens

    def _read(self, text: str, *, armed: bool) -> bool:
        """Take new text. True when a stop string ended the completion."""
        if self._parser is None:
            return self._add_content(text, armed=armed)
        return self._sort(self._parser.feed(text), armed=armed)

    def _sort(self, events: Sequence[Event], *, armed: bool) -> bool:
        """Stop strings are looked for in content alone."""
        for event in events:
            if isinstance(event, Content):
                if self._add_content(event.text, armed=armed):
                    return True
            elif self._rules.send_text:
                self.has_news = True
                if isinstance(event, Reasoning):
                    self._pending_reasoning.append(event.text)
                else:
                    self._pending_calls.add(event)
        return False

    def _add_content(self, text: str, *, armed: bool) -> bool:
        released = self._matcher.feed(text, armed=armed)
        self._show(released.text)
        if released.stop is None:
            return False
        self._finish(Finish(reason=FinishReason.FINISH_REASON_STOP_STRING, stop=released.stop))
        return True

    def _flush(self) -> bool:
        """The text is over. True when a stop string ended the completion: what was held back may complete one."""
        if self._read(self._detokenizer.flush(), armed=self._is_armed):
            return True
        if self._parser and self._sort(self._parser.flush(), armed=self._is_armed):
            return True
        self._show(self._matcher.flush())
        return False

    def _end(self, output: RequestOutput) -> None:
        if self._flush():
            return
        special = self._rules.special_stops.get(output.stop_token_id) if output.HasField("stop_token_id") else None
        if special is not None:
            self._finish(Finish(reason=FinishReason.FINISH_REASON_STOP_STRING, stop=special))
            if self._rules.include_stop:
                self._show(special)
            return
        finish = Finish(reason=output.finish_reason, detail=output.detail)
        if output.HasField("stop_token_id"):
            finish.stop_token_id = output.stop_token_id
        self._finish(finish)

    def _finish(self, finish: Finish) -> None:
        self.finish = finish
        self.has_news = True

    def _keep(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> None:
        self.token_ids.extend(token_ids)
        if self._rules.send_token_ids and token_ids:
            self._pending_ids.extend(token_ids)
            self.has_news = True
        if logprobs:
            self._pending_logprobs.add(logprobs)
            self.has_news = True

    def _show(self, text: str) -> None:
        if text and self._rules.send_text:
            self._pending_text.append(text)
            self.has_news = True
