"""Settings: what cannot work is one clear line and exit code 2, before anything is loaded."""

import json

import pytest

from common.config import parse_settings
from fissile.errors import InvalidArgumentError
from tests.fakes import tokenizer as toys
from worker.config import WorkerSettings
from worker.core.model_drafter import ModelDrafter
from worker.core.ngram_drafter import NgramDrafter
from worker.face.served_files import files_reader


def parse(*argv):
    return parse_settings(WorkerSettings, list(argv), "worker")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "70000"], "worker: --port: "),
        (["--num-threads", "100000"], "worker: --num-threads: Input should be less than or equal to 1024"),
        (["--device", "tpu"], "worker: --device: Input should be 'auto', 'cpu' or 'cuda' (got 'tpu')"),
        (["--kernel-backend", "cuda"], "worker: --kernel-backend: Input should be 'auto', 'native', "),
        (["--kv-cache-gib", "inf"], "worker: --kv-cache-gib: Input should be a finite number (got 'inf')"),
        (["--swap-space-gib", "nan"], "worker: --swap-space-gib: Input should be a finite number (got 'nan')"),
        (
            ["--model-impl", "transformers", "--quantization", "int8"],
            "worker: --quantization: int8 needs layers of fissile's own, not --model-impl transformers",
        ),
        (["--model-impl", "transformers", "--tensor-parallel-size", "2"], "--tensor-parallel-size: 2 needs layers"),
        (["--model-impl", "transformers", "--expert-parallel"], "--expert-parallel: on needs layers of fissile's own"),
        (["--model-impl", "transformers", "--speculative", "mtp"], "--speculative: mtp needs layers of fissile's own"),
        (["--dp-rank", "2", "--dp-size", "2"], "--dp-rank 2 is not below --dp-size 2"),
        (["--model-version", "v 2"], "--model-version: 'v 2' has more than 64 characters, or others than letters"),
        (["--tls-key", "key.pem"], "--tls-certificate and --tls-key go together"),
        (["--preemption-mode", "swap"], "--preemption-mode swap needs --swap-space-gib above 0"),
        (["--block-size", "24"], "block_size: is 24; 1 or a multiple of 16 is needed, such as 16 or 32"),
        (["--max-num-batched-tokens", "100"], "max_num_seqs of at most 100"),
        (["--max-prefill-chunk", "99999"], "max_prefill_chunk: is 99999"),
        (["--secure-kv", "--swap-space-gib", "1"], "secure: is set with num_host_blocks"),
        (["--speculative", "ngram", "--num-speculative-tokens", "16000"], "max_num_batched_tokens: is 16384"),
        (["--num-speculative-tokens", "0"], "--num-speculative-tokens: "),
        (["--speculative", "eagle"], "--speculative: "),
        (["--min-ngram", "5"], "--min-ngram 5 is above --max-ngram 4"),
        (["--speculative", "draft"], "--speculative draft or eagle3 and --draft-model go together"),
        (["--speculative", "eagle3"], "--speculative draft or eagle3 and --draft-model go together"),
        (
            ["--speculative", "ngram", "--draft-model", "smollm2"],
            "draft or eagle3 and --draft-model go together",
        ),
    ],
)
def test_what_cannot_work_is_named(argv, said, capsys):
    with pytest.raises(SystemExit) as exited:
        parse(*argv)
    printed = capsys.readouterr().err
    assert exited.value.code == 2
    assert said in printed and printed.count("\n") == 1


def test_flags_reach_scheduler_cache_and_runner():
    settings = parse(
        "--max-num-seqs", "7", "--block-size", "32", "--no-enable-prefix-caching", "--no-async-scheduling",
        "--max-prefill-chunk", "64", "--num-blocks", "9", "--dtype", "bfloat16",
    )  # fmt: skip
    scheduler, cache, runner = settings.scheduler_config(100), settings.cache_config(9, 0), settings.runner_config()
    assert (scheduler.max_num_seqs, scheduler.async_depth, scheduler.max_prefill_chunk) == (7, 0, 64)
    assert (cache.block_size, cache.enable_prefix_caching, cache.num_blocks) == (32, False, 9)
    assert (runner.max_num_seqs, runner.block_size, runner.num_blocks, runner.dtype) == (7, 32, 9, "bfloat16")


def test_speculation_reaches_scheduler_runner_and_drafter():
    """The steps are planned one by one then."""
    settings = parse("--speculative", "ngram", "--num-speculative-tokens", "3", "--min-ngram", "1")
    scheduler = settings.scheduler_config(100)
    assert (scheduler.num_speculative_tokens, scheduler.async_depth, settings.async_depth) == (3, 0, 0)
    runner = settings.runner_config()
    assert (runner.num_speculative_tokens, runner.drafter) == (3, None)
    assert isinstance(settings.drafter(), NgramDrafter)


def test_a_draft_model_is_asked_in_the_ranks():
    settings = parse("--speculative", "draft", "--draft-model", "smollm2", "--num-speculative-tokens", "3")
    runner = settings.runner_config()
    assert (runner.draft_model, runner.num_speculative_tokens, settings.async_depth) == ("smollm2", 3, 0)
    assert isinstance(settings.drafter(), ModelDrafter) and runner.drafter == "draft"
    settings = parse("--speculative", "eagle3", "--draft-model", "draft")
    runner = settings.runner_config()
    assert (runner.draft_model, runner.drafter, settings.async_depth) == ("draft", "eagle3", 0)
    assert isinstance(settings.drafter(), ModelDrafter)
    settings = parse("--speculative", "mtp")
    runner = settings.runner_config()
    assert (runner.draft_model, runner.drafter, settings.async_depth) == (None, "mtp", 0)
    assert isinstance(settings.drafter(), ModelDrafter)


def test_without_speculation_there_are_no_drafts():
    settings = parse("--num-speculative-tokens", "3")
    assert (settings.scheduler_config(100).num_speculative_tokens, settings.async_depth) == (0, 1)
    assert settings.runner_config().num_speculative_tokens == 0
    assert settings.drafter() is None


def test_every_setting_has_a_description_and_a_variable(monkeypatch):
    assert all(field.description for field in WorkerSettings.model_fields.values())
    monkeypatch.setenv("FISSILE_WORKER_MAX_NUM_SEQS", "3")
    assert parse().max_num_seqs == 3


def test_a_model_is_called_by_the_last_name_of_its_path(tmp_path, monkeypatch):
    for folder in ("a/llama-3", "b/llama-3"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "llama.Q8_0.gguf").touch()
    monkeypatch.chdir(tmp_path / "a/llama-3")
    paths = [tmp_path / "a/llama-3", f"{tmp_path}/b/llama-3/", ".", tmp_path / "llama.Q8_0.gguf", "owner/name"]
    names = [WorkerSettings(model=str(path)).model_names for path in [*paths, "smollm2"]]
    assert names == [("llama-3",)] * 3 + [("llama.Q8_0",), ("owner/name",), ("smollm2",)]


def test_a_model_may_be_given_names(capsys):
    settings = parse("--served-model-name", "llama,prod", "--served-model-name", "gpt-4o", "--served-model-name=llama")
    assert settings.model_names == ("llama", "prod", "gpt-4o")
    for name in ("a\nb", "x" * 257):
        with pytest.raises(SystemExit):
            parse("--served-model-name", name)
        assert "--served-model-name: " in capsys.readouterr().err


TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 400, "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_a_template_that_the_worker_was_told_is_the_one_it_serves(tmp_path):
    model, path = tmp_path / "model", tmp_path / "mine.jinja"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_LLAMA))
    for name, content in toys.files(toys.byte_level()).items():
        (model / name).write_bytes(content)
    path.write_text("{{ messages }}")
    own = files_reader(WorkerSettings(model=str(model)))()
    told = files_reader(WorkerSettings(model=str(model), chat_template=path))()
    files = told.tokenizer
    assert files.files["chat_template.jinja"] == b"{{ messages }}"
    assert b"chat_template" not in files.files["tokenizer_config.json"]
    assert files.fingerprint != own.tokenizer.fingerprint
    assert told.model_fingerprint == own.model_fingerprint
    path.write_text("{{ messages")
    with pytest.raises(InvalidArgumentError, match=f"chat-template {path}, line 1: "):
        files_reader(WorkerSettings(model=str(model), chat_template=path))


@pytest.mark.parametrize(
    ("settings", "kept"), [({}, 32), ({"secure_kv": True}, 0), ({"enable_prefix_caching": False}, 0)]
)
def test_states_are_kept_where_prefixes_are_reused_and_nothing_must_be_cleared(settings, kept):
    assert WorkerSettings(**settings).runner_config().num_state_checkpoints == kept
