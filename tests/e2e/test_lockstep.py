"""Two workers that share the experts of one model, behind a router: the tokens of one, and one end."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from fissile import Client
from fissile.errors import UnavailableError
from tests.fakes import tokenizer as toys
from tests.fakes.ports import free_port
from tests.models.cases.qwen3_moe import QWEN3_MOE
from tests.models.saved import Saved, save

SECRET = "a secret of ranks"
PROMPTS = [[5], [6, 7, 8], [9] * 20, list(range(10, 50))]
OPTIONS = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    tokenizer = toys.byte_level()
    config = Qwen3MoeConfig(**QWEN3_MOE | {"vocab_size": tokenizer.get_vocab_size()})
    made = save(lambda: Qwen3MoeForCausalLM(config), tmp_path / "moe")
    for name, content in toys.files(tokenizer).items():
        (made.path / name).write_bytes(content)
    return made


def test_workers_that_share_experts_answer_together_and_end_together(services, saved, monkeypatch):
    monkeypatch.setenv("FISSILE_WORKER_RANKS_SECRET", SECRET)
    flags = ("--model", str(saved.path), "--num-threads", "1", "--num-blocks", "64", "--max-num-seqs", "8",
             "--expert-parallel", "--dp-size", "2", "--dp-port", str(free_port()))  # fmt: skip
    workers = {f"rank-{rank}": services.launch(f"rank-{rank}", "worker", *flags, "--dp-rank", rank) for rank in "01"}
    addresses = ",".join(services.address_of(name, child) for name, child in workers.items())
    _, router = services.start(
        "router", "router", "--workers", addresses, "--policy", "round_robin", "--worker-wait", "1"
    )
    with Client(router) as client:
        while sum(worker.healthy for worker in client.stats().workers) < 2:
            time.sleep(0.05)

        def ours(prompt: list[int]) -> list[int]:
            return list(client.generate(prompt, max_tokens=32, **OPTIONS).result().completions[0].token_ids)

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            for prompt, output in zip(PROMPTS, pool.map(ours, PROMPTS), strict=True):
                saved.assert_greedy(prompt, output)
        assert all(worker.num_generated_tokens > 32 for worker in client.stats().workers), "both had requests"

        stream = client.generate([5], max_tokens=200, **OPTIONS)
        next(stream)
        killed, survivor = workers["rank-1"], workers["rank-0"]
        os.kill(killed.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError):
            stream.result()
    deadline = time.monotonic() + 20
    while survivor.exit_code is None:
        assert time.monotonic() < deadline, "it goes on without the other's experts"
        time.sleep(0.02)
    assert survivor.exit_code == 1
    assert survivor.last_lines[-1] == "worker: data-parallel rank 1 is gone"
