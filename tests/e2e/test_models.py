"""Tiny models of several kinds, each by a worker of its own behind one router: greedy tokens are those of transformers
in float32."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers as hf
from transformers import PreTrainedModel

from fissile import Client
from tests.e2e.conftest import Services
from tests.fakes import tokenizer as toys
from tests.models.cases import SMALL, VOCABULARY, all_cases
from tests.models.saved import Saved, save
from tests.runner.conftest import random_prompt

NUM_TOKENS = 40
FLAGS = ("--num-threads", "1", "--num-blocks", "64", "--max-num-seqs", "8", "--log-level", "warning")
THROUGH_TRANSFORMERS = "olmo2"
DRAFTED = "gemma3"
"""By a draft model, which is itself."""
CASES: dict[str, Callable[[], PreTrainedModel]] = {
    name: all_cases()[name] for name in ("gemma3", "qwen3-moe", "deepseek-v32")
} | {
    THROUGH_TRANSFORMERS: lambda: hf.Olmo2ForCausalLM(
        hf.Olmo2Config(**{key: value for key, value in SMALL.items() if key != "head_dim"})
    )
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: save(make, folder / name) for name, make in CASES.items()}
    for name in made:
        for file, content in toys.files(toys.byte_level()).items():
            (folder / name / file).write_bytes(content)
    return made


@pytest.fixture(scope="module")
def router(saved: dict[str, Saved], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    services = Services(tmp_path_factory.mktemp("ports"))
    try:
        flags = {name: ("--model", str(model.path), *FLAGS) for name, model in saved.items()}
        flags[THROUGH_TRANSFORMERS] += ("--model-impl", "transformers")
        draft_model = str(saved[DRAFTED].path)
        flags[DRAFTED] += ("--speculative", "draft", "--draft-model", draft_model, "--num-speculative-tokens", "3")
        workers = [(name, services.launch(name, "worker", *flags[name])) for name in flags]
        addresses = ",".join(services.address_of(name, worker) for name, worker in workers)
        yield services.start("router", "router", "--workers", addresses)[1]
    finally:
        services.children.stop(5)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_of_prompts_side_by_side(name: str, saved: dict[str, Saved], router: str) -> None:
    prompts = [random_prompt(length, length, VOCABULARY) for length in (3, 17, 30, 58)]
    with Client(router) as client, ThreadPoolExecutor(len(prompts)) as pool:

        def answer(prompt: list[int]) -> list[int]:
            found = client.generate(
                prompt, model=name, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, return_token_ids=True
            )
            return list(found.result().completions[0].token_ids)

        for prompt, tokens in zip(prompts, pool.map(answer, prompts), strict=True):
            assert len(tokens) == NUM_TOKENS
            saved[name].assert_greedy(prompt, tokens)
        (worker,) = (worker for worker in client.stats().workers if worker.model == name)
        assert (worker.num_accepted_tokens == worker.num_draft_tokens > NUM_TOKENS) is (name == DRAFTED)
