"""The embedded model against transformers reading the same GGUF file, in float32."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from tests.data.greedy_reference import FILE, greedy, load_model
from tests.runner.conftest import make_driver
from tests.runner.driver import Driver
from worker.loader.gguf.checkpoint import GGUFCheckpoint
from worker.loader.load_config import load_model_config
from worker.loader.source import resolve_model
from worker.loader.tokenizer import load_tokenizer_files

CASES = json.loads(FILE.read_text())["cases"]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "1, 2, 3, 5, 8, 13,",
]


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return load_model()


@pytest.fixture(scope="module")
def their_tokenizer() -> PreTrainedTokenizerBase:
    path = resolve_model("smollm2").path
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def our_tokenizer() -> Tokenizer:
    return Tokenizer.from_str(load_tokenizer_files(resolve_model("smollm2")).files["tokenizer.json"].decode())


@pytest.fixture(scope="module")
def driver() -> Driver:
    return make_driver("smollm2", num_blocks=256)


def test_configuration() -> None:
    config = load_model_config(resolve_model("smollm2"))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.max_model_len, config.rope.theta) == (49152, 8192, 100000.0)
    assert config.tie_word_embeddings and config.eos_token_ids == (2, 0)


def test_dequantised_weights_equal_transformers(reference: LlamaForCausalLM) -> None:
    source = resolve_model("smollm2")
    checkpoint = GGUFCheckpoint(source.path, load_model_config(source))
    theirs = dict(reference.named_parameters())
    assert set(checkpoint.names()) == set(theirs)
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name).read(), theirs[name]), name


def test_a_shard_reads_the_same_rows_and_columns_as_the_whole() -> None:
    source = resolve_model("smollm2")
    checkpoint = GGUFCheckpoint(source.path, load_model_config(source))
    for name in ("model.layers.3.self_attn.k_proj.weight", "model.layers.3.mlp.down_proj.weight"):
        tensor = checkpoint.tensor(name)
        whole = tensor.read()
        assert torch.equal(tensor.read(0, 64, 128), whole[64:192])
        assert torch.equal(tensor.read(1, 192, 64), whole[:, 192:256])


def test_the_tokens_on_file_are_not_stale(reference: LlamaForCausalLM) -> None:
    case = CASES[0]
    assert greedy(reference, case["prompt"]) == case["tokens"]


def test_greedy_tokens_alone_and_in_a_batch(driver: Driver) -> None:
    cases = [CASES[i] for i in (0, 2, 7, 13)]
    prompts = [case["prompt"] for case in cases]
    together = [driver.add(prompt) for prompt in prompts]
    driver.prefill(*together)
    driver.decode(*together, steps=63)
    alone = driver.add(prompts[0])
    driver.prefill(alone)
    driver.decode(alone, steps=63)
    expected = [case["tokens"] for case in cases]
    assert [seq.output for seq in together] == expected
    assert alone.output == expected[0]


@pytest.mark.parametrize(
    "text",
    [*PROMPTS, "<|im_start|>user\nHi!<|im_end|>\n", "naïve 😀 漢字\t\n\n  end", "it's 1234567 o'clock", "", " "],
)
def test_token_ids_equal_transformers(
    text: str, our_tokenizer: Tokenizer, their_tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = our_tokenizer.encode(text).ids
    assert ids == their_tokenizer(text).input_ids
    assert our_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_template_comes_along(their_tokenizer: PreTrainedTokenizerBase) -> None:
    files = load_tokenizer_files(resolve_model("smollm2")).files
    assert files["chat_template.jinja"].decode() == their_tokenizer.chat_template
