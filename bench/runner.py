"""What one rank does beside the model, CPU time of its thread at 256 decoding rows: prepare, a newcomer's plan, and the
batch's way through the pipe. Needs no model: a runner of two small layers."""

import pickle
import statistics
import time
from collections.abc import Callable

import torch

from bench.common import Figure, finish, parse_arguments
from worker.attention.interface import make_builders
from worker.core.batch import DEFERRED_TOKEN, NewSequence, ScheduledBatch
from worker.core.cache.pools import PoolPlan
from worker.core.params import SamplingParams
from worker.core.tokens import token_array
from worker.kernels.select import Kernels
from worker.layers.setup import LayerSetup
from worker.loader.config import ModelConfig
from worker.loader.rope import RopeConfig
from worker.models.llama import LlamaForCausalLM
from worker.models.weights import fill_with_noise, pack_weights
from worker.parallel.group import Group
from worker.processes.messages import PICKLE_PROTOCOL
from worker.runner.assembly import Assembly
from worker.runner.config import RunnerConfig
from worker.runner.model_runner import ModelRunner

BLOCK_SIZE, CONTEXT, VOCABULARY = 16, 64, 49_152


def main() -> None:
    quick = parse_arguments(__doc__).quick
    num_rows, num_repeats = (16, 20) if quick else (256, 300)
    torch.set_num_threads(1)
    with torch.inference_mode():
        runner = small_runner(num_rows)
        preparer, rules = runner._parts.preparer, runner._parts.slots.rules
        runner.execute(prefill(num_rows))
        step = decode(num_rows)
        slots = list(step.slots)
        newcomer = new_sequence(num_rows // 2, temperature=0.8, top_p=0.9)

        def plan_newcomer() -> None:
            rules.bind(newcomer)
            rules.of(slots)

        figures: dict[str, Figure] = {
            f"prepare_us_{num_rows}": microseconds(lambda: preparer.prepare(step), num_repeats),
            f"newcomer_plan_us_{num_rows}": microseconds(plan_newcomer, num_repeats),
            f"codec_us_{num_rows}": microseconds(
                lambda: pickle.loads(pickle.dumps(step, PICKLE_PROTOCOL)), num_repeats
            ),
        }
    finish("runner", figures, quick=quick, dtype="float32", threads=1, packages=("torch", "numpy"))


def microseconds(work: Callable[[], object], num_repeats: int) -> float:
    """Median CPU time of this thread: others on the machine do not count."""
    times = []
    for _ in range(num_repeats):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return round(statistics.median(times) * 1e6, 1)


def small_runner(num_rows: int) -> ModelRunner:
    kernels = Kernels(torch.device("cpu"))
    config = ModelConfig(
        architecture="LlamaForCausalLM", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=VOCABULARY, max_model_len=2048, rms_norm_eps=1e-5, rope=RopeConfig(10_000.0),
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config, LayerSetup(kernels, Group(), torch.float32))
    fill_with_noise(model, seed=0)
    pack_weights(model)
    builders = make_builders(model.cache_layers(), kernels, BLOCK_SIZE)
    specs = [spec for builder in builders for spec in builder.pool_specs()]
    blocks = num_rows * (CONTEXT // BLOCK_SIZE + 1)
    settings = RunnerConfig(max_num_seqs=num_rows, max_num_batched_tokens=num_rows * CONTEXT, block_size=BLOCK_SIZE)
    plan = PoolPlan.of(specs, blocks, num_rows)
    assembly = Assembly(
        config=settings, kernels=kernels, tp=Group(), model=model, builders=builders, max_model_len=config.max_model_len
    )
    return assembly.runner(plan)


def new_sequence(slot: int, **sampling: float) -> NewSequence:
    tokens = token_array([(slot * 7919 + at) % VOCABULARY for at in range(CONTEXT)])
    per_row = CONTEXT // BLOCK_SIZE + 1
    blocks = tuple(range(slot * per_row, (slot + 1) * per_row))
    return NewSequence(slot, tokens, CONTEXT, SamplingParams(**sampling), blocks)  # type: ignore[arg-type]


def prefill(num_rows: int) -> ScheduledBatch:
    news = [new_sequence(slot, temperature=0.8, top_k=40) for slot in range(num_rows)]
    return ScheduledBatch(
        step=0, slots=list(range(num_rows)), num_scheduled_tokens=[CONTEXT] * num_rows,
        num_computed_tokens=[0] * num_rows, input_ids=token_array([t for new in news for t in new.token_ids]),
        samples=[True] * num_rows, new_sequences=news,
    )  # fmt: skip


def decode(num_rows: int) -> ScheduledBatch:
    return ScheduledBatch(
        step=1, slots=list(range(num_rows)), num_scheduled_tokens=[1] * num_rows,
        num_computed_tokens=[CONTEXT] * num_rows, input_ids=token_array([DEFERRED_TOKEN] * num_rows),
        samples=[True] * num_rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
