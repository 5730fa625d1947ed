"""The tests' worker without a model, for benchmarks of the router: real tokenizer files, steps at no cost.

    python -m bench.synthetic_worker --port-file FILE [--step-time SECONDS]

Every step gives each sequence of the stream one token, in one message, as a real worker does.
"""

import argparse
import asyncio
from pathlib import Path

import tokenizers

from common.ports import write_port_file
from common.signals import stop_event_on_signals
from tests.fakes.asked import Asked
from tests.fakes.worker import FakeWorker
from worker.loader.source import resolve_model
from worker.loader.tokenizer import load_tokenizer_files

TEXT = (
    "The router reads one message a step from every worker, turns token ids into text, looks for stop strings, and "
    "sends what is new to each client. Naïve code pays for every token; good code pays for every message. "
)


def make_worker(step_time: float) -> FakeWorker:
    """Its model: a text that begins elsewhere for each sequence, and never ends by itself."""
    files = load_tokenizer_files(resolve_model("smollm2")).files
    backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    text_ids = backend.encode(TEXT, add_special_tokens=False).ids

    def script(asked: Asked) -> list[int]:
        start = asked.id * 7 % len(text_ids)
        num_repeats = asked.group.max_tokens // len(text_ids) + 2
        return (text_ids * num_repeats)[start : start + asked.group.max_tokens]

    return FakeWorker(
        script,
        model="synthetic",
        max_model_len=1 << 20,
        vocab_size=backend.get_vocab_size(),
        step_seconds=step_time,
        files=files,
    )


async def serve(port_file: Path, step_time: float) -> None:
    """Until a signal comes."""
    stop = stop_event_on_signals()
    worker = await make_worker(step_time).start()
    write_port_file(port_file, worker.port)
    await stop.wait()
    await worker.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--step-time", type=float, default=0.0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port_file, arguments.step_time))
