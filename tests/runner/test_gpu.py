"""The same runner on a GPU: tokens equal the CPU's, and nothing in `submit` waits for the device."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.runner.conftest import greedy_reference, make_driver, random_prompt, save_llama
from tests.runner.driver import Driver, cache_of
from tests.runner.executors import WAIT, Synchronous, tiny_config
from worker.core.params import SamplingParams
from worker.executor.executor import Executor
from worker.runner.graphs import Take

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("exact_float32"),
]

SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=7)
EVERY = replace(
    SAMPLED,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.3,
    logit_bias=((5, 2.0), (6, -2.0)),
    allowed_token_ids=tuple(range(3, 100)),
    banned_token_ids=(4, 9),
    bad_token_sequences=((11,), (12, 13), (14, 15, 16)),
    num_logprobs=5,
    num_prompt_logprobs=3,
)
"""Every parameter but a grammar."""


@pytest.fixture(autouse=True)
def free_device() -> None:
    """Runners of earlier tests that wait for the collector would count as somebody else's memory."""
    gc.collect()
    torch.cuda.empty_cache()


def test_greedy_tokens_equal_transformers_on_the_cpu(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0], device="cuda")
    seqs = [driver.add(random_prompt(n, n)) for n in (1, 5, 16, 33, 70)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=63)
    for seq in seqs:
        assert seq.output == greedy_reference(tiny[1], seq.tokens[: seq.num_prompt], 64)


def test_weights_that_are_read_in_small_parts_are_the_same(
    tiny: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.loader.staged.CHUNK_BYTES", 256)
    driver = make_driver(tiny[0], device="cuda")
    seq = driver.add(random_prompt(20, 1))
    driver.prefill(seq)
    driver.decode(seq, steps=15)
    assert seq.output == greedy_reference(tiny[1], seq.tokens[: seq.num_prompt], 16)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """Of a shape that every kernel serves."""
    path = tmp_path_factory.mktemp("wide-llama")
    return path, save_llama(path, hidden_size=128, intermediate_size=192, num_attention_heads=4, head_dim=64)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_from_graphs_equal_transformers(wide: tuple[Path, LlamaForCausalLM], enforce_eager: bool) -> None:
    driver = make_driver(wide[0], device="cuda", enforce_eager=enforce_eager)
    assert sorted(driver.runner._parts.forward._graphs.full) == ([] if enforce_eager else [1, 2, 4, 8, 16])
    seqs = [driver.add(random_prompt(n, n)) for n in (1, 5, 16, 33, 70)]
    driver.prefill(*seqs[:3])
    driver.run([(seqs[0], 1), (seqs[3], 20), (seqs[2], 1)])  # in pieces
    driver.run([(seqs[4], 70), (seqs[3], 13), (seqs[1], 1)])
    for num in (5, 3, 1, 4):  # padded to 8, 4, 1, 4 rows
        driver.decode(*seqs[:num], steps=12)
    for seq in seqs:
        assert seq.output == greedy_reference(wide[1], seq.tokens[: seq.num_prompt], len(seq.output))


def test_no_step_waits_for_a_kernel(wide: tuple[Path, LlamaForCausalLM], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    driver = make_driver(wide[0], device="cuda", num_blocks=200)
    lengths, asked = (1, 5, 16, 33, 70, 130), (SamplingParams(temperature=0.0), SAMPLED, EVERY)
    for params in asked:
        seqs = [driver.add(random_prompt(n, n), params) for n in lengths[: 16 // len(asked)]]
        driver.prefill(*seqs)
        driver.decode(*seqs, steps=3)
    assert "made ready" in caplog.text
    assert [record.getMessage() for record in caplog.records if "held up" in record.getMessage()] == []


def test_a_replayed_step_writes_its_rows_alone(wide: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(wide[0], device="cuda")
    with torch.inference_mode():
        for cache in cache_of(driver.runner):
            cache.normal_()
    seqs = [driver.add(random_prompt(n, n)) for n in (3, 20, 9)]
    driver.prefill(*seqs)
    outside = list(driver.free)[:-3]
    before = [cache[outside].clone() for cache in cache_of(driver.runner)]
    tokens = driver.runner._parts.slots.tables.tokens[3:16].clone()
    driver.decode(*seqs, steps=9)  # 3 rows, padded to 4
    for old, cache in zip(before, cache_of(driver.runner), strict=True):
        assert torch.equal(old, cache[outside])
    assert torch.equal(tokens, driver.runner._parts.slots.tables.tokens[3:16])


def test_whole_steps_give_the_tokens_of_others(
    tiny: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one step ahead, and with more than graphs have takes."""
    started, start = [], Take.start
    monkeypatch.setattr(Take, "start", lambda take, batch: started.append(batch.step) or start(take, batch))
    driver = make_driver(tiny[0], device="cuda")
    seqs = [driver.add(random_prompt(n, n)) for n in (20, 9, 5)]
    driver.prefill(*seqs)
    for rows in ([(seqs[0], 1)], [(seq, 1) for seq in seqs]):
        for ahead in (1, 4):
            with torch.inference_mode():
                pending = [driver.runner.submit(driver.batch(rows)) for _ in range(ahead)]
                for _ in range(12):
                    pending.append(driver.runner.submit(driver.batch(rows)))
                    driver.commit(rows, pending.pop(0).result())
                for step in pending:
                    driver.commit(rows, step.result())
                    assert step.timing.wait() > 0
    for seq in seqs:
        assert seq.output == greedy_reference(tiny[1], seq.tokens[: seq.num_prompt], len(seq.output))
    assert len(started) > 20


def test_seeded_tokens_equal_the_cpus(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    outputs = []
    for device in ("cpu", "cuda"):
        driver = make_driver(tiny[0], device=device)
        seqs = [driver.add(random_prompt(n, n), params) for n, params in ((4, SAMPLED), (20, EVERY), (9, EVERY))]
        driver.prefill(*seqs)
        driver.decode(*seqs, steps=31)
        outputs.append([seq.output for seq in seqs])
    assert outputs[0] == outputs[1]


def test_submit_never_waits_for_the_device(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    """torch raises at any call that would synchronise."""
    driver = make_driver(tiny[0], device="cuda", swap_space_gib=0.001)
    params = (SAMPLED, SamplingParams(seed=3), EVERY)
    a, b, c = (driver.add(random_prompt(n, n), p) for n, p in zip((20, 9, 5), params, strict=True))
    driver.prefill(a, b, c)
    spare = [driver.free.pop() for _ in range(4)]
    works = [[(a, 1), (b, 1), (c, 1)], [(b, 1), (driver.add(random_prompt(30, 9)), 30), (a, 1)]]
    moves = {
        "blocks_to_zero": spare[:1],
        "blocks_to_copy": [(spare[0], spare[1])],
        "blocks_to_swap_out": [(spare[2], 0)],
        "blocks_to_swap_in": [(1, spare[3])],
        "beam_rows": [1],
        "num_candidates": 4,
    }
    batches = [driver.batch(works[0]), driver.batch(works[0]), driver.batch(works[1], **moves)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            pending = [driver.runner.submit(batch) for batch in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [step.result().step for step in pending] == [batch.step for batch in batches]


def test_swap_through_pinned_memory(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0], device="cuda", swap_space_gib=0.001)
    assert driver.runner._parts.mover._pages[0][1].is_pinned()
    seq, other = driver.add(random_prompt(40, 2)), driver.add(random_prompt(5, 3))
    driver.prefill(seq)
    old = list(seq.blocks)
    driver.run([(other, 5)], blocks_to_swap_out=[(block, 9 - i) for i, block in enumerate(old)])
    driver.run([(other, 1)], blocks_to_zero=old)
    seq.blocks = [driver.free.pop() for _ in old]
    seq.bound = False
    driver.run([(seq, 1)], blocks_to_swap_in=[(9 - i, block) for i, block in enumerate(seq.blocks)])
    driver.decode(seq, steps=8)
    assert seq.output == greedy_reference(tiny[1], seq.tokens[:40], 10)


def test_cache_is_sized_from_what_the_device_has_left(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0], device="cuda", num_blocks=None, gpu_memory_utilization=0.3)
    cache = cache_of(driver.runner)[0]
    free, total = torch.cuda.mem_get_info()
    assert len(cache) > 1000
    assert 0.25 * total < total - free < 0.32 * total


def test_cache_of_the_probe_does_not_count(tmp_path: Path) -> None:
    """A context of 512 k tokens is 4 GiB here; the probe's rows are a few tokens long."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=1 << 19,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    driver = make_driver(
        tmp_path, device="cuda", num_blocks=None, gpu_memory_utilization=0.5, max_num_seqs=4, max_model_len=1 << 19
    )
    free, total = torch.cuda.mem_get_info()
    assert driver.runner is not None
    assert 0.48 * total < total - free < 0.51 * total


def test_executor_queues_steps_ahead(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    executor = Executor(tiny_config(tiny[0], device="cuda"))
    executor.start(WAIT)
    try:
        driver = Driver(Synchronous(executor), 64, 16)  # type: ignore[arg-type]
        seq = driver.add(random_prompt(10, 1))
        work = [[(seq, 10)], *[[(seq, 1)]] * 31]
        for rows in work:
            executor.submit(driver.batch(rows))
        outputs = [executor.collect(WAIT) for _ in work]
        assert [output.token_ids[0][0] for output in outputs] == greedy_reference(tiny[1], seq.tokens, 32)
    finally:
        executor.shutdown()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_two_gpus_give_the_tokens_of_the_cpu(wide: tuple[Path, LlamaForCausalLM], enforce_eager: bool) -> None:
    config = tiny_config(wide[0], device="cuda", tensor_parallel_size=2, enforce_eager=enforce_eager)
    executor = Executor(config)
    executor.start(WAIT)
    try:
        driver = Driver(Synchronous(executor), 64, 16)  # type: ignore[arg-type]
        seqs = [driver.add(random_prompt(n, n)) for n in (5, 33)]
        driver.prefill(*seqs)
        driver.decode(*seqs, steps=63)
        for seq in seqs:
            assert seq.output == greedy_reference(wide[1], seq.tokens[: seq.num_prompt], 64)
    finally:
        executor.shutdown()
