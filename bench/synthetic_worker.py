"""A worker without a model, for benchmarks of the router: the whole protocol, real tokenizer files, tokens at no cost.

    python -m bench.synthetic_worker --port-file FILE [--step-time SECONDS]

Every step gives each sequence of the stream one token, in one message, as a real worker does.
"""

import argparse
import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from common.server import ServiceServer, stop_event_on_signals, write_port_file
from fissile.v1 import (
    ExecuteRequest,
    ExecuteResponse,
    FinishReason,
    GetLoadResponse,
    GetTokenizerResponse,
    GetWorkerResponse,
    RequestOutput,
    Sequence,
    WorkerLoad,
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)
from worker.loader.source import resolve_model
from worker.loader.tokenizer import TokenizerFiles, load_tokenizer_files

SERVICE_NAME = "fissile.v1.WorkerService"
EPOCH = "synthetic"
TEXT = (
    "The router reads one message a step from every worker, turns token ids into text, looks for stop strings, and "
    "sends what is new to each client. Naïve code pays for every token; good code pays for every message. "
)


@dataclass(slots=True)
class Running:
    """A sequence, how many tokens it may have and how many it has."""

    sequence: Sequence
    max_tokens: int
    num_tokens: int = 0


class SyntheticWorker(WorkerServiceServicer):
    """Stateless between streams."""

    def __init__(self, tokenizer: TokenizerFiles, step_time: float) -> None:
        self._tokenizer = tokenizer
        self._step_time = step_time
        backend = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
        self._vocab_size = backend.get_vocab_size()
        self._text_ids = backend.encode(TEXT, add_special_tokens=False).ids

    async def GetWorker(self, request: object, context: object) -> GetWorkerResponse:
        return GetWorkerResponse(
            model="synthetic",
            tokenizer_fingerprint=self._tokenizer.fingerprint,
            max_model_len=1 << 20,
            vocab_size=self._vocab_size,
            epoch=EPOCH,
        )

    async def GetTokenizer(self, request: object, context: Any) -> AsyncIterator[GetTokenizerResponse]:
        for name, data in self._tokenizer.files.items():
            checksum = hashlib.sha256(data).hexdigest()
            yield GetTokenizerResponse(name=name, data=data, sha256=checksum, fingerprint=self._tokenizer.fingerprint)

    async def GetLoad(self, request: object, context: object) -> GetLoadResponse:
        return GetLoadResponse(load=WorkerLoad())

    async def Execute(self, requests: AsyncIterator[ExecuteRequest], context: Any) -> AsyncIterator[ExecuteResponse]:
        await context.send_initial_metadata(())
        running: dict[int, Running] = {}
        has_work = asyncio.Event()
        reader = asyncio.create_task(_read(requests, running, has_work))
        step = 0
        try:
            while True:
                await has_work.wait()
                await asyncio.sleep(self._step_time)
                outputs = [self._next_output(r) for r in running.values()]
                for output in outputs:
                    if output.finish_reason:
                        del running[output.sequence_id]
                if not running:
                    has_work.clear()
                step += 1
                yield ExecuteResponse(step=step, outputs=outputs, load=WorkerLoad(num_running=len(running)))
        finally:
            reader.cancel()

    def _next_output(self, running: Running) -> RequestOutput:
        """The model: a text that begins elsewhere for each sequence, and never ends by itself."""
        sequence, position = running.sequence, running.num_tokens
        running.num_tokens += 1
        return RequestOutput(
            sequence_id=sequence.id,
            token_offset=position,
            token_ids=(self._text_ids[(sequence.id * 7 + position) % len(self._text_ids)],),
            finish_reason=(
                FinishReason.FINISH_REASON_LENGTH
                if running.num_tokens >= running.max_tokens
                else FinishReason.FINISH_REASON_UNSPECIFIED
            ),
        )


async def _read(requests: AsyncIterator[ExecuteRequest], running: dict[int, Running], has_work: asyncio.Event) -> None:
    async for request in requests:
        for command in request.commands:
            if command.HasField("abort"):
                running.pop(command.abort.sequence_id, None)
            else:
                for sequence in command.group.sequences:
                    running[sequence.id] = Running(sequence, command.group.max_tokens)
        if running:
            has_work.set()


async def serve(port_file: Path, step_time: float) -> None:
    """Until a signal comes."""
    stop = stop_event_on_signals()
    server = ServiceServer(SERVICE_NAME)
    worker = SyntheticWorker(load_tokenizer_files(resolve_model("smollm2")), step_time)
    add_WorkerServiceServicer_to_server(worker, server.server)
    write_port_file(port_file, await server.start("127.0.0.1", 0))
    await server.set_serving(True)
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--step-time", type=float, default=0.0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port_file, arguments.step_time))
