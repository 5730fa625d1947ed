"""A worker without a model: the real protocol over a real socket, tokens from a script.

What it takes and how it refuses is decided by the real worker's own checks.
"""

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.server import ServiceServer
from fissile.errors import InvalidArgumentError, UnavailableError
from fissile.tls import ServerTls
from fissile.v1 import (
    AbortSequence,
    ExecuteResponse,
    FinishReason,
    GetLoadResponse,
    GetTokenizerResponse,
    GetWorkerResponse,
    RequestOutput,
    SequenceGroup,
    WorkerLoad,
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)
from tests.fakes import tokenizer as toys
from tests.fakes.asked import (
    EOS,
    MAX_NUM_SEQS,
    Asked,
    Running,
    Script,
    entries_of,
    logprobs_of,
    refusal_of,
)
from worker.core.outputs import SequenceOutput
from worker.face.access import Access
from worker.face.convert_outputs import add_output, error_to_pb, pieces_of

NAME = "fissile.v1.WorkerService"
_epochs = itertools.count(1)


@dataclass
class FakeWorker(WorkerServiceServicer):
    """One step every `step_seconds`: each sequence gets its next `tokens_per_step` tokens."""

    script: Script
    model: str = "toy"
    aliases: list[str] = field(default_factory=list)
    model_version: str = ""
    model_fingerprint: str = "weights"
    max_model_len: int = 1024
    vocab_size: int = 400
    step_seconds: float = 0.002
    tokens_per_step: int = 1
    mute_after: int | None = None
    """Answer nothing any more once a sequence has so many tokens. 0: never answer."""
    prompt_chunk: int = 512
    """Prompt tokens a step."""
    refuse: RequestOutput | None = None
    """What every sequence gets at once."""
    others: WorkerLoad = field(default_factory=WorkerLoad)
    """Load that other routers put on it."""
    capabilities: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=lambda: toys.files(toys.byte_level()))
    dp_rank: int = 0
    dp_size: int = 1
    lockstep_group: str = ""
    tls: ServerTls | None = None
    access: Access = field(default_factory=Access)
    host: str = "127.0.0.1"

    def __post_init__(self):
        self.epoch = f"epoch-{next(_epochs)}"
        self.groups: list[SequenceGroup] = []
        self.received: list[Asked] = []
        """Their sequences."""
        self.batches: list[int] = []
        """Commands in each message."""
        self.aborted: list[int] = []
        self.num_streams = 0
        self.last_ids: Counter[int] = Counter()
        """The greatest sequence id of each stream."""
        self.running: dict[tuple[int, int], Running] = {}
        self.step = 0
        self.num_emitted = 0
        self.service: ServiceServer | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self, serving: bool = True) -> "FakeWorker":
        self.service = ServiceServer(NAME, self.tls, admit=self.access.check)
        self.service.serve(add_WorkerServiceServicer_to_server, self)
        self.port = await self.service.start(self.host, self.port)
        await self.service.set_serving(serving)
        return self

    async def kill(self) -> None:
        """As kill -9 looks from the other side: every stream breaks."""
        await self.service.close(0)
        self.running.clear()

    def forget(self) -> None:
        """What was noted about commands: in long runs it would grow."""
        self.groups.clear()
        self.received.clear()
        self.batches.clear()
        self.aborted.clear()

    async def GetWorker(self, request, context):
        return GetWorkerResponse(
            model=self.model,
            model_aliases=self.aliases,
            architectures=["ToyForCausalLM"],
            tokenizer_fingerprint=toys.fingerprint(self.files),
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            epoch=self.epoch,
            eos_token_ids=[EOS],
            capabilities=self.capabilities,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            lockstep_group=self.lockstep_group,
            model_fingerprint=self.model_fingerprint,
            model_version=self.model_version,
            dtype="float32",
            max_num_seqs=MAX_NUM_SEQS,
        )

    async def GetTokenizer(self, request, context):
        await context.send_initial_metadata(())
        for name, content in self.files.items():
            half = len(content) // 2
            yield GetTokenizerResponse(name=name, data=content[:half])
            yield GetTokenizerResponse(
                name=name,
                data=content[half:],
                sha256=hashlib.sha256(content).hexdigest(),
                fingerprint=toys.fingerprint(self.files),
            )

    async def GetLoad(self, request, context):
        return GetLoadResponse(load=self._load(), step=self.step)

    async def Execute(self, request_iterator, context):
        await context.send_initial_metadata(())
        self.num_streams += 1
        stream = self.num_streams
        has_news = asyncio.Event()
        reader = asyncio.create_task(self._read(stream, request_iterator, has_news))
        reader.add_done_callback(lambda _: has_news.set())
        try:
            while True:
                if not any(key[0] == stream for key in self.running):
                    await has_news.wait()
                    has_news.clear()
                await asyncio.sleep(self.step_seconds)
                outputs = self._step(stream)
                if outputs:
                    self.step += 1
                    last_id = self.last_ids[stream]
                    whole = ExecuteResponse(
                        step=self.step, outputs=outputs, load=self._load(), last_sequence_id=last_id
                    )
                    for response in pieces_of(whole):
                        yield response
                if reader.done() and reader.exception():
                    raise UnavailableError(str(reader.exception()))
        finally:
            reader.cancel()
            for key in [key for key in self.running if key[0] == stream]:
                del self.running[key]

    async def _read(self, stream: int, requests, has_news: asyncio.Event) -> None:
        async for request in requests:
            self.batches.append(len(request.commands))
            for command in request.commands:
                if command.HasField("abort"):
                    self._abort(stream, command.abort)
                else:
                    self._add_group(stream, command.group)
            has_news.set()

    def _abort(self, stream: int, abort: AbortSequence) -> None:
        self.aborted.append(abort.sequence_id)
        running = self.running.get((stream, abort.sequence_id))
        if running is not None:
            running.abort()

    def _add_group(self, stream: int, group: SequenceGroup) -> None:
        if not group.sequences:
            raise InvalidArgumentError.of("commands", "neither a group of sequences nor an abort is set")
        self.groups.append(group)
        error = refusal_of(group, self.vocab_size, self.max_model_len)
        for member in group.sequences:
            asked = Asked(group, member)
            self.received.append(asked)
            self.last_ids[stream] = max(self.last_ids[stream], member.id)
            if error is not None:
                outputs = iter([error_to_pb(error, member.id, member.index)])
            elif self.refuse is not None:
                outputs = iter([_copy(self.refuse)])
            else:
                outputs = iter(self._outputs(asked))
            self.running[stream, member.id] = Running(asked, outputs)

    def _outputs(self, sequence: Asked) -> Iterator[RequestOutput]:
        """One a step, the last with the end; what was generated before is not sent again."""
        tokens = self.script(sequence)
        group = sequence.group
        num_left = self.max_model_len - len(group.prompt_token_ids)
        is_limited = group.HasField("max_tokens") or len(tokens) < num_left
        reason = FinishReason.FINISH_REASON_LENGTH if is_limited else FinishReason.FINISH_REASON_MODEL_LENGTH
        tokens = tokens[: group.max_tokens if group.HasField("max_tokens") else num_left]
        stops = set(group.stop_token_ids) | (set() if group.ignore_eos else {EOS})
        ends = [i for i, token in enumerate(tokens) if token in stops]
        if ends:
            tokens = tokens[: ends[0] + 1]
            is_eos = tokens[-1] == EOS and not group.ignore_eos
            reason = FinishReason.FINISH_REASON_EOS if is_eos else FinishReason.FINISH_REASON_STOP_TOKEN
        yield from self._prompt_outputs(sequence)
        done = len(sequence.member.token_ids)
        has_logprobs = group.sampling.HasField("num_logprobs")
        for start in range(done, max(len(tokens), done + 1), self.tokens_per_step):
            end = start + self.tokens_per_step
            output = RequestOutput(index=sequence.index, token_offset=start, token_ids=tokens[start:end])
            if has_logprobs:
                output.logprobs.extend(logprobs_of(output.token_ids, group.sampling.num_logprobs))
            if start == done or end >= len(tokens):
                output.num_cached_tokens = num_cached_tokens(sequence)
                output.timings.queued.FromMilliseconds(7)
            if end >= len(tokens):
                output.finish_reason = reason
                if ends:
                    output.stop_token_id = tokens[-1]
            yield output

    def _prompt_outputs(self, sequence: Asked) -> Iterator[RequestOutput]:
        """A chunk of `prompt_chunk` tokens a step."""
        sampling, prompt = sequence.group.sampling, sequence.group.prompt_token_ids[1:]
        if not sampling.HasField("num_prompt_logprobs") or not sequence.is_first:
            return
        for start in range(0, len(prompt), self.prompt_chunk):
            entries = [entries_of(token, sampling.num_prompt_logprobs) for token in prompt[start:][: self.prompt_chunk]]
            news = SequenceOutput(0, sequence.index, len(sequence.member.token_ids), [])
            news.prompt_logprobs, news.prompt_logprobs_offset = entries, start
            response = ExecuteResponse()
            add_output(response, news, 0)
            yield from response.outputs

    def _step(self, stream: int) -> list[RequestOutput]:
        ready = []
        for key in [key for key in self.running if key[0] == stream]:
            running = self.running[key]
            if not running.is_aborted and self._is_mute(running):
                continue
            output = running.take()
            self.num_emitted += len(output.token_ids)
            if output.finish_reason:
                del self.running[key]
            ready.append(output)
        return ready

    def _is_mute(self, running: Running) -> bool:
        return self.mute_after is not None and running.next.token_offset >= self.mute_after

    def _load(self) -> WorkerLoad:
        load = WorkerLoad()
        load.CopyFrom(self.others)
        load.num_running += len(self.running)
        return load


def _copy(output: RequestOutput) -> RequestOutput:
    copy = RequestOutput()
    copy.CopyFrom(output)
    return copy


def num_cached_tokens(sequence: Asked) -> int:
    """Four of a prompt were there before; later members of a group, and what was computed elsewhere, find more."""
    return 4 if sequence.is_first and not sequence.member.token_ids else sequence.num_prompt_tokens + 100


def says(text: str, *, eos: bool = True) -> Script:
    """A script of this text, in the toy tokenizer's tokens."""
    ids = toys.byte_level().encode(text, add_special_tokens=False).ids
    return lambda sequence: [*ids, EOS] if eos else ids


def counts(length: int) -> Script:
    """Tokens that depend on the prompt's length, the seed and the position: a resumed completion must continue them."""
    return lambda sequence: [
        3 + (sequence.num_prompt_tokens * 7 + sequence.sampling.seed % 97 + position * 13) % 300
        for position in range(length)
    ]
