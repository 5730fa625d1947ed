"""Prompt look-up on SmolLM2 in this process, on one thread: CPU time per generated token with and without drafts.

Two tasks: quote a text back, where drafts are mostly right, and go on from its beginning, where they mostly are not.
Both are greedy, and give the same tokens with and without.
"""

import time
from collections.abc import Sequence as Items

import torch
from tokenizers import Tokenizer

from bench.common import Figure, finish, parse_arguments
from worker.core.batch import BatchOutput, ScheduledBatch
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.ngram_drafter import NgramDrafter
from worker.core.outputs import LoadSnapshot
from worker.core.params import SamplingParams, StopConditions
from worker.core.scheduler import Scheduler
from worker.core.sequence import Sequence
from worker.core.tokens import token_array
from worker.engine.steps import Steps, run_to_end
from worker.loader.source import resolve_model
from worker.loader.tokenizer import load_tokenizer_files
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig
from worker.runner.model_runner import ModelRunner

MODEL = "smollm2"
NUM_ROWS = (1, 4)
TEXT = (
    "The lighthouse keeper wrote every evening into a thick brown book: the wind, the height of the waves, which ships "
    "had passed and in which direction. On the third of March he noted that the lamp had flickered twice before "
    "midnight, that a grey schooner lay off the northern rocks, and that her crew had answered none of his signals. "
    "In the morning the schooner was gone, and where she had been a single oar drifted towards the harbour."
)
TASKS = {
    "quote": f"<|im_start|>user\nRepeat the following text word by word.\n\n{TEXT}<|im_end|>\n<|im_start|>assistant\n",
    "prose": TEXT[:120],
}


class InProcess:
    """A runner of this process as an executor; a step is done when it was submitted."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._outputs: list[BatchOutput] = []

    def submit(self, batch: ScheduledBatch) -> None:
        self._outputs.append(self._runner.execute(batch))

    def collect(self, timeout: float) -> BatchOutput:
        return self._outputs.pop(0)


def main() -> None:
    quick = parse_arguments(__doc__).quick
    num_tokens, num_repeats = (8, 1) if quick else (96, 2)
    torch.set_num_threads(1)
    config = RunnerConfig(model=MODEL, device="cpu", num_blocks=512, max_model_len=1024, max_num_seqs=max(NUM_ROWS))
    runner, _ = build_runner(config, Group())
    tokenizer = Tokenizer.from_str(load_tokenizer_files(resolve_model(MODEL)).files["tokenizer.json"].decode())
    figures: dict[str, Figure] = {}
    for name, text in TASKS.items():
        prompt = tokenizer.encode(text).ids
        for num_rows in NUM_ROWS:
            for num_drafts in (0, 4, 8):
                runs = [decode_ms(runner, prompt, num_rows, num_tokens, num_drafts) for _ in range(num_repeats)]
                milliseconds, load = min(runs, key=lambda run: run[0])
                figures[f"{name}_{num_rows}_ms_per_token_drafts_{num_drafts}"] = round(milliseconds, 2)
                if num_drafts:
                    share = load.num_accepted_tokens / max(load.num_draft_tokens, 1)
                    figures[f"{name}_{num_rows}_accepted_share_drafts_{num_drafts}"] = round(share, 2)
    finish("speculation", figures, quick=quick, dtype="float32", threads=1, packages=("torch",))


def decode_ms(
    runner: ModelRunner, prompt: Items[int], num_rows: int, num_tokens: int, num_drafts: int
) -> tuple[float, LoadSnapshot]:
    """CPU milliseconds per generated token, scheduler included, after the step that computes the prompts."""
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=1024, max_num_seqs=8, async_depth=0, num_speculative_tokens=num_drafts),
        CacheConfig(num_blocks=512, enable_prefix_caching=False),
        drafter=NgramDrafter(2, 4) if num_drafts else None,
    )
    for id in range(num_rows):
        tokens, stop = token_array(prompt), StopConditions(max_tokens=num_tokens)
        scheduler.add(Sequence(id=id, token_ids=tokens, num_prompt_tokens=len(tokens), stop=stop, sampling=GREEDY))
    steps = run_to_end(scheduler, Steps(scheduler, InProcess(runner), async_depth=0, step_timeout=0))
    next(steps)
    start = time.process_time()
    for _ in steps:
        pass
    seconds, load = time.process_time() - start, scheduler.load()
    return seconds * 1e3 / (load.num_generated_tokens - num_rows), load


GREEDY = SamplingParams(temperature=0.0)

if __name__ == "__main__":
    main()
