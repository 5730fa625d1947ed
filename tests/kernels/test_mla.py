"""Multi-head latent attention over a paged cache against float64. What no row wrote is NaN."""

import pytest
import torch

from tests.kernels.latent_rig import LatentRows, mla_spec
from tests.kernels.rig import Rig


@pytest.mark.parametrize("num_heads", [3, 16, 40])
@pytest.mark.parametrize(("block_size", "context_lens"), [(1, [17]), (16, [1, 140, 16, 33])], ids=str)
def test_uniform_rows(rig: Rig, num_heads: int, block_size: int, context_lens: list[int]) -> None:
    rows = LatentRows(rig, mla_spec(rig, num_heads), [1] * len(context_lens), context_lens, block_size)
    rig.assert_close(rows.attend(), rows.exact())


def test_pairs_of_rotation_may_be_halves(rig: Rig) -> None:
    rows = LatentRows(rig, mla_spec(rig, is_interleaved=False), [1, 1, 5], [9, 21, 20], 16)
    rig.assert_close(rows.attend(), rows.exact())


def test_several_tokens_of_uniform_rows_and_padding(rig: Rig) -> None:
    rows = LatentRows(rig, mla_spec(rig), [3, 3, 9], [30, 3, 30], 16, uniform_len=3, num_padding=2)
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize("query_lens", [[20], [70, 5, 1], [1, 1, 33, 100, 2]], ids=str)
def test_chunks(rig: Rig, query_lens: list[int]) -> None:
    """With a prefix in the cache and without; some beside rows that decode."""
    lens = [n + prefix for n, prefix in zip(query_lens, [40, 0, 17, 0, 133], strict=False)]
    rows = LatentRows(rig, mla_spec(rig), query_lens, lens, 16)
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize("num_heads", [1, 3])
def test_a_context_is_expanded_in_pieces(rig: Rig, monkeypatch: pytest.MonkeyPatch, num_heads: int) -> None:
    from worker.kernels.torch import mla

    monkeypatch.setattr(mla, "MAX_SCORES", 1)
    monkeypatch.setattr(mla, "MAX_GATHERED", 1)
    rows = LatentRows(rig, mla_spec(rig, num_heads), [1, 40, 30], [20, 75, 30], 16)
    rig.assert_close(rows.attend(), rows.exact())


def test_a_step_writes_its_own_tokens_alone(rig: Rig) -> None:
    rows = LatentRows(rig, mla_spec(rig), [1, 5], [20, 36], 16, num_padding=1, top_k=8)
    rows.attend()
    own = [slot for row in rows.rows if row.context_len for slot in row.token_slots(16)[-row.num_tokens :]]
    for before, after in zip(rows.before, rows.after, strict=True):
        changed = torch.zeros(before.shape[0] * 16, dtype=torch.bool)
        changed[own] = True
        changed[-16:] = True  # the spare block
        old, new = (entry[:, 1].flatten(0, 1)[~changed] for entry in (before, after))
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
        assert not after[:, 1].flatten(0, 1)[own].isnan().any()


@pytest.mark.parametrize("top_k", [16, 32])
def test_tokens_that_the_index_chooses(rig: Rig, top_k: int) -> None:
    """Rows and chunks, with contexts below the number of tokens that are chosen and above."""
    if rig.dtype != torch.float32:
        pytest.skip("rounding makes other tokens the best")
    rows = LatentRows(rig, mla_spec(rig), [1, 1, 1, 50, 9], [120, 9, 33, 50, 77], 16, num_padding=1, top_k=top_k)
    rig.assert_close(rows.attend(), rows.exact())
    chosen = rows.chosen()
    assert chosen is not None and chosen.dtype == torch.int32
    assert [(row >= 0).sum().item() for row in chosen[:3]] == [top_k, 9, min(top_k, 33)]


def test_of_equal_scores_the_earliest_tokens_are_chosen(rig: Rig) -> None:
    """Rows and chunks: else what a token sees would go by how its prompt was cut."""
    rows = LatentRows(rig, mla_spec(rig), [1, 1, 3], [60, 9, 40], 16, top_k=20)
    rows.weights = torch.zeros_like(rows.weights)
    chosen = rows.chosen()
    assert chosen is not None
    tables = [rows.rows[number].table for number in (0, 1, 2, 2, 2)]
    for row, table, num in zip(chosen.tolist(), tables, (20, 9, 20, 20, 20), strict=True):
        first = [table[at // 16] * 16 + at % 16 for at in range(num)]
        assert sorted(row) == sorted([*first, *[-1] * (20 - num)])


def test_short_contexts_are_attended_to_as_a_whole(rig: Rig) -> None:
    rows = LatentRows(rig, mla_spec(rig), [1, 1, 20], [32, 9, 31], 16, top_k=32)
    assert rows.chosen() is None
    rig.assert_close(rows.attend(), rows.exact())
