"""Peer: ctranslate2, whose batches are static. Arguments: float32 directory in Hugging Face's form, threads."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters import TransformersConverter
from protocol import serve


def main() -> None:
    source, threads = Path(sys.argv[1]), int(sys.argv[2])
    directory = source.with_name(f"{source.name}-ctranslate2")
    if not directory.is_dir():
        TransformersConverter(str(source)).convert(str(directory))
    generator = ctranslate2.Generator(
        str(directory), device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads
    )
    vocabulary = json.loads((directory / "vocabulary.json").read_text())

    def run(prompts: list[list[int]], num_new: int) -> tuple[float, int]:
        times: list[float] = []
        lock = threading.Lock()

        def on_token(_: Any) -> bool:
            with lock:
                times.append(time.perf_counter())
            return False

        results = generator.generate_batch(
            [[vocabulary[token] for token in prompt] for prompt in prompts],
            max_length=num_new, min_length=num_new, sampling_topk=1, beam_size=1, end_token=[],
            include_prompt_in_result=False, callback=on_token,
        )  # fmt: skip
        return min(times), sum(len(result.sequences_ids[0]) for result in results)

    serve(run)


if __name__ == "__main__":
    main()
