"""What is Triton's own: splits of long rows, prompts in parts, and that every kernel compiles for real GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.loop import Loop, make_sequence
from tests.kernels.latent_rig import LatentRows, mla_spec
from tests.kernels.rig import BACKENDS, DTYPES, Rig, Rows
from tests.runner.conftest import greedy_reference, make_driver, random_prompt, save_llama
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.model_drafter import ModelDrafter
from worker.kernels.sampling import FAILED
from worker.kernels.select import Kernels
from worker.kernels.step import SlotTables
from worker.parallel.group import Group
from worker.parallel.symmetric import Inboxes, Parts
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

DEVICES = [torch.device(device) for name, device in BACKENDS if name == "triton"]
pytestmark = pytest.mark.skipif(not DEVICES, reason="needs an NVIDIA GPU, or Triton's interpreter: make kernels")


@pytest.fixture(params=DTYPES, ids=str)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(Kernels(DEVICES[0], "triton"), request.param)


@pytest.mark.parametrize(("window", "uniform_len"), [(None, 2), (60, 1)])
def test_long_rows_get_extra_programs_until_there_are_no_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, window: int | None, uniform_len: int
) -> None:
    """Of many rows, so that one program a row is usual."""
    from worker.kernels.triton import gqa_splits

    monkeypatch.setattr(gqa_splits, "LONG", 32)
    num_rows = 4 if rig.device.type == "cpu" else 1000
    lens = [150, 3, 260, 33, *[5] * num_rows, 40, 135]
    rows = Rows(
        rig, (2, 1, 16), [uniform_len] * len(lens), lens, 16, uniform_len=uniform_len, num_padding=2, window=window,
        has_sinks=True,
    )  # fmt: skip
    splits = rows.metadata.splits
    assert splits.usual == 1 and splits.num_extra > 0
    wanted = [-(-min(n, window + uniform_len if window else n) // 32) - 1 for n in lens]
    assert int(splits.extra_rows[0]) == min(sum(wanted), splits.num_extra)
    assert splits.by_row[:2].tolist() == [1 + wanted[0], 1 + wanted[1]]
    rig.assert_close(rows.attend(), rows.exact())


def test_few_rows_share_what_counts_their_parts(rig: Rig) -> None:
    """Step after step: it is left as it was found, and not cleared."""
    rows = Rows(rig, (2, 1, 16), [1, 1], [150, 260], 16)
    arrived = rows.metadata.arrived
    for _ in range(2):
        rig.assert_close(rows.attend(), rows.exact())
        assert len(arrived) == 2 and not arrived.any()
    assert rows.kernel.prepare(rows.step, rows.buffers, 16).arrived.data_ptr() == arrived.data_ptr()


def test_heads_products_of_many_tokens_are_cublass(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.kernels.triton import mla_heads

    monkeypatch.setattr(mla_heads, "MAX_PAIRS", 1)
    rows = LatentRows(rig, mla_spec(rig), [1, 1, 5], [9, 21, 20], 16)
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize("is_apart", [False, True])
def test_the_beginning_of_a_prompt_is_computed_without_the_cache(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_apart: bool
) -> None:
    """Whole pieces of it; what is left over, and chunks with a prefix, read the cache."""
    from worker.kernels.triton import gqa, gqa_parts
    from worker.kernels.triton.gqa_parts import Dense, Paged

    monkeypatch.setattr(gqa, "LONG_DENSE", 64 if is_apart else 128)
    monkeypatch.setattr(gqa_parts, "DENSE_PIECE", 32)
    rows = Rows(rig, (4, 2, 16), [1, 40, 64, 9, 40, 70], [50, 40, 64, 9, 60, 70], 16)
    if rig.dtype != torch.float32:
        assert rows.metadata.parts == (
            Dense(1, 32), Paged(33, 8, 1, 1, 40, 32), Dense(41, 64), Paged(105, 49, 3, 2, 60),
            Dense(154, 64), Paged(218, 6, 5, 1, 70, 64),
        )  # fmt: skip
    rig.assert_close(rows.attend(), rows.exact())
    alone = Rows(rig, (4, 2, 16), [64], [64], 16)
    rig.assert_close(alone.attend(), alone.exact())


def test_prompts_of_one_length_are_computed_together(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are next to each other, by powers of two."""
    from worker.kernels.triton import gqa_parts
    from worker.kernels.triton.gqa_parts import Dense, Paged

    monkeypatch.setattr(gqa_parts, "DENSE_PIECE", 32)
    lens = [3, 32, 32, 32, 64, 40, 32, 32]
    rows = Rows(rig, (4, 2, 16), lens, lens, 16)
    if rig.dtype != torch.float32:
        assert rows.metadata.parts == (
            Paged(0, 3, 0, 1, 3), Dense(3, 32, 2), Dense(67, 32), Dense(99, 64), Dense(163, 32),
            Paged(195, 8, 5, 1, 40, 32), Dense(203, 32, 2),
        )  # fmt: skip
    rig.assert_close(rows.attend(), rows.exact())
    monkeypatch.setattr(gqa_parts, "MAX_TOGETHER", 2)
    alone = Rows(rig, (4, 2, 16), [32] * 4, [32] * 4, 16)
    rig.assert_close(alone.attend(), alone.exact())
    assert len(alone.metadata.parts) in (1, 2)


def test_keys_are_split_where_chunks_are_few(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.kernels.triton import gqa_splits

    monkeypatch.setattr(gqa_splits, "SHORT", 32)
    for window in (None, 100):
        rows = Rows(rig, (4, 1, 16), [1, 5, 3], [20, 260, 3], 16, window=window, has_sinks=window is not None)
        assert gqa_splits.chunk_splits(rows.kernel._machine, 2, 260).usual > 1
        rig.assert_close(rows.attend(), rows.exact())


def test_parts_of_rows_are_put_together_by_the_last_program(rig: Rig) -> None:
    """Of a long row; a short one has one part, and one is padding. Nothing is left for the next layer."""
    rows = Rows(rig, (2, 1, 64), [1, 1], [140, 1], 16, num_padding=1)
    assert rows.metadata.splits.usual > 1 and rows.metadata.arrived is not None
    for _ in range(2):
        rig.assert_close(rows.attend(), rows.exact())
        assert not rows.metadata.arrived.any()


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_a_sum_are_added_up_where_the_norm_is(rig: Rig, size: int) -> None:
    """On one of the ranks, twice; what the others send is there already."""
    from worker.kernels.triton.sum_norm import sum_and_norm

    rank, num_rows, width, num_words = 1, 3, 24, 32
    empty = torch.full((64, 2, size, num_words), -1, dtype=torch.int32, device=rig.device)
    inboxes = [empty.clone() for _ in range(size)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=rig.device)
    there = Inboxes(addresses, torch.zeros(64, dtype=torch.int32, device=rig.device), num_words, rank, inboxes[rank])
    residual, weight = rig.noise(num_rows, width, seed=8), rig.noise(width, seed=9)
    for turn in (0, 1):
        xs = [rig.noise(num_rows, width, seed=10 * turn + r) for r in range(size)]
        messages = [x.clone().view(torch.int32) for x in xs]
        at = slice(messages[0].shape[1])
        for r, message in enumerate(messages):
            if r != rank:
                inboxes[rank][:num_rows, turn, r, at] = message
        total = residual.double() + sum(x.double() for x in xs)
        exact = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()

        assert there.hold(xs[rank])
        rig.assert_close(sum_and_norm(xs[rank], residual, weight, 1e-6, there, overlaps=False, num_warps=1), exact)
        rig.assert_close(residual, total)
        assert there.turns.tolist() == [1 - turn] * num_rows + [0] * 61
        assert torch.equal(inboxes[rank], empty), "what was received has left no trace"
        for r, inbox in enumerate(inboxes):
            if r != rank:
                assert torch.equal(inbox[:num_rows, turn, rank, at], messages[rank]), r


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_choose_the_best_token_of_all(rig: Rig, rank: int) -> None:
    """On one of them; what the others send is there already. The first of equals, of whichever rank."""
    from worker.kernels.triton.machine import INTERPRETER
    from worker.kernels.triton.sample_ranks import TritonBestOfRanks

    size, num_rows, width, num_words = 3, 6, 600, 32
    parts = [rig.noise(num_rows, width + 7, seed=r)[:, :width] for r in range(size)]
    parts[1][0, 44] = parts[1][0, 99] = parts[2][0, 3] = 9.0
    parts[0][1, 599] = parts[2][1, 0] = 9.0
    parts[2][2, 300] = float("nan")
    parts[0][3, 1] = float("inf")
    for part in parts:
        part[4] = float("-inf")
    whole = torch.cat(parts, 1).float()
    expected = [width + 44, 599, FAILED, FAILED, FAILED, int(whole[5].argmax())]
    empty = torch.full((64, 2, size, num_words), -1, dtype=torch.int32, device=rig.device)
    inboxes = [empty.clone() for _ in range(size)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=rig.device)
    there = Inboxes(addresses, torch.zeros(64, dtype=torch.int32, device=rig.device), num_words, rank, inboxes[rank])
    slots, positions = (torch.arange(num_rows, device=rig.device) + first for first in (0, 40))
    slots, choose = slots.flip(0), TritonBestOfRanks(INTERPRETER)
    for turn in (0, 1):
        best = [part.float().nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf")) for part in parts]
        for r in set(range(size)) - {rank}:
            inboxes[rank][:num_rows, turn, r, 0] = best[r].amax(1).view(torch.int32)
            inboxes[rank][:num_rows, turn, r, 1] = (r * width + best[r].argmax(1)).int()
        tokens = torch.zeros(num_rows, 99, dtype=torch.int32, device=rig.device)
        lengths, none = torch.ones_like(slots), torch.empty(0)
        remembered = SlotTables(tokens, lengths, none, none)
        chosen = choose(parts[rank], rank * width, there, slots, positions, remembered)
        assert chosen.tolist() == expected
        assert tokens[slots, positions].tolist() == [max(token, 0) for token in expected]
        assert lengths[slots].tolist() == (positions + 1).tolist()
        assert torch.equal(inboxes[rank], empty), "what was received has left no trace"
        assert there.turns.tolist() == [1 - turn] * num_rows + [0] * 58
        for r in set(range(size)) - {rank}:
            values, tokens = inboxes[r][:num_rows, turn, rank, :2].unbind(1)
            assert torch.equal(values.contiguous().view(torch.float32), best[rank].amax(1))
            assert tokens[5] == rank * width + int(best[rank][5].argmax())


def test_parts_of_many_rows_are_read_where_they_are(rig: Rig) -> None:
    from worker.kernels.triton.sum_norm import norm_of_parts

    size, num_rows, width, before = 2, 70, 24, 96
    xs = [rig.noise(num_rows, width, seed=rank) for rank in range(size)]
    memory = [torch.cat((rig.noise(before), x.flatten())) for x in xs]
    there = Parts(torch.tensor([m.data_ptr() for m in memory], device=rig.device), before * xs[0].element_size())
    residual, weight = rig.noise(num_rows, width, seed=8), rig.noise(width, seed=9)
    total = residual.double() + sum(x.double() for x in xs)
    exact = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    rig.assert_close(norm_of_parts(there, residual, weight, 1e-6, num_warps=1), exact)
    rig.assert_close(residual, total)
    for x, m in zip(xs, memory, strict=True):
        assert torch.equal(m[before:], x.flatten())


def test_what_looks_like_no_message_is_not_a_number_for_all_ranks(rig: Rig) -> None:
    """Of the bits that stand for nothing, other bits of NaN arrive."""
    from worker.kernels.triton.sum_norm import sum_and_norm

    inboxes = [torch.full((64, 2, 2, 32), -1, dtype=torch.int32, device=rig.device) for _ in range(2)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=rig.device)
    there = Inboxes(addresses, torch.zeros(64, dtype=torch.int32, device=rig.device), 32, 0, inboxes[0])
    x, residual, weight = rig.noise(1, 24), rig.noise(1, 24, seed=1), rig.noise(24, seed=2)
    words = x.view(torch.int32)
    words[0, 3] = -1
    inboxes[0][0, 0, 1, : words.shape[1]] = 0
    sent = words[0].tolist()
    sum_and_norm(x, residual, weight, 1e-6, there, overlaps=False, num_warps=1)
    sent[3] = 0x7FFFFFFF
    assert inboxes[1][0, 0, 0, : len(sent)].tolist() == sent
    assert residual.isnan().any()


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int) -> None:
    compiled = run_compiler("tests.kernels.compile_triton", str(capability)).split()
    assert {
        "attend_rows_kernel", "attend_chunks_kernel", "reduce_kernel", "_rows_kernel", "_prepare_kernel",
        "_grouped_rows_kernel", "_spread_kernel",
    } <= set(compiled)  # fmt: skip


def test_no_step_needs_a_kernel_that_was_not_compiled_ahead() -> None:
    """Whatever its rows are and ask for: see the module."""
    found = json.loads(run_compiler("tests.kernels.first_steps"))
    assert found["late"] == []
    expected = {"attend_rows_kernel", "attend_chunks_kernel", "reduce_kernel", "_rows_kernel", "_prepare_kernel"}
    assert expected | {"_limit_kernel"} <= set(found["ahead"])


@pytest.mark.parametrize("num_rows", [1, 2])
def test_kernels_of_a_step_of_few_rows_begin_before_those_before_them_end(num_rows: int) -> None:
    """All but the first; and there is nothing else, as the last one writes its tokens to the host."""
    for launches in json.loads(run_compiler("tests.kernels.lone_step", str(num_rows))).values():
        assert [name for name in launches if name.startswith("|")] == ["|_prepare_kernel"]
        assert launches[-4:-2] == ["_norm_kernel", "vector_kernel" if num_rows == 1 else "held_kernel"]


def run_compiler(*module: str) -> str:
    """What it prints. In a process of its own, for this one may interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_draft_model_proposes_what_the_model_says(tmp_path: Path) -> None:
    """As it is the model itself: its passes and the model's find keys and values in the same blocks."""
    model = save_llama(tmp_path, num_hidden_layers=1)
    config = RunnerConfig(
        model=str(tmp_path), drafter="draft", draft_model=str(tmp_path), device=DEVICES[0].type,
        kernel_backend="triton", num_blocks=16, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64,
        num_speculative_tokens=3,
    )  # fmt: skip
    limits = SchedulerConfig(max_model_len=64, max_num_seqs=4, async_depth=0, num_speculative_tokens=3)
    loop = Loop(build_runner(config, Group())[0], limits, CacheConfig(num_blocks=16), ModelDrafter())
    prompts = [random_prompt(n, n) for n in (5, 30)]
    loop.run(*(make_sequence(i, prompt, 8) for i, prompt in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert loop.tokens[i] == greedy_reference(model, prompt, 8)
    load = loop.scheduler.load()
    assert load.num_accepted_tokens == load.num_draft_tokens == 10


def test_a_models_tokens_equal_transformers(tmp_path: Path) -> None:
    """Through the runner, all operations together: chunks, decode, rows that come and go, and one alone between."""
    model = save_llama(tmp_path)
    driver = make_driver(tmp_path, device=DEVICES[0].type, kernel_backend="triton")
    a, b, c = (driver.add(random_prompt(n, n)) for n in (5, 33, 20))
    driver.prefill(a)
    driver.run([(a, 1), (b, 20)])
    driver.run([(a, 1), (b, 13), (c, 20)])
    driver.decode(c, a, b)
    driver.decode(c, a)
    driver.decode(b, steps=3)
    driver.decode(a, b)
    for seq in (a, b, c):
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], len(seq.output))


def test_long_rows_of_latents_get_extra_programs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.kernels.triton import gqa_splits

    monkeypatch.setattr(gqa_splits, "LONG", 32)
    num_rows = 4 if rig.device.type == "cpu" else 1000
    lens = [150, 3, 260, 33, *[5] * num_rows, 40, 135]
    rows = LatentRows(rig, mla_spec(rig), [2] * len(lens), lens, 16, uniform_len=2, num_padding=2)
    (part,) = rows.metadata.parts
    assert part.splits.usual == 1 and part.splits.num_extra > 0
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize("num_heads", [3, 40])
def test_latents_of_chunks_are_split_where_these_are_few(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, num_heads: int
) -> None:
    from worker.kernels.triton import gqa_splits

    monkeypatch.setattr(gqa_splits, "SHORT", 32)
    rows = LatentRows(rig, mla_spec(rig, num_heads), [1, 5, 3], [20, 260, 3], 16)
    if num_heads == 3:
        assert rows.metadata.parts[-1].splits.usual > 1
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_the_context_of_a_long_chunk_is_expanded_in_pieces(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, num_pieces: int
) -> None:
    from worker.kernels.triton import mla

    monkeypatch.setattr(mla, "LONG_CHUNK", 30)
    monkeypatch.setattr(mla, "EXPANDED_BYTES", 80 * 3 * 48 * rig.dtype.itemsize if num_pieces > 1 else 1 << 27)
    rows = LatentRows(rig, mla_spec(rig), [1, 5, 50, 7, 140], [9, 5, 190, 20, 140], 16)
    assert [type(part).__name__ for part in rows.metadata.parts] == [
        "Absorbed", "Absorbed", "Expanded", "Absorbed", "Expanded",
    ]  # fmt: skip
    rig.assert_close(rows.attend(), rows.exact())
