"""Two tensor-parallel ranks of each case: one pair of processes for all of them, as starting takes most of the time."""

import multiprocessing
from pathlib import Path

import torch

from tests.models.rank import LENGTHS, run_rank
from tests.models.saved import Saved


def test_two_ranks_equal_transformers(saved_cases: dict[str, Saved], tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    paths = {name: str(saved.path) for name, saved in saved_cases.items()}
    ranks = [context.Process(target=run_rank, args=(rank, str(tmp_path / "store"), paths, results)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    try:
        for name, saved in saved_cases.items():
            found, texts, logits = results.get(timeout=120)
            assert found == name, texts
            for row, (text, length) in enumerate(zip(texts, LENGTHS, strict=True)):
                saved.assert_greedy(text[:length], text[length:])
                saved.assert_logits(torch.tensor(logits)[:, row], text, length - 1)
    finally:
        for rank in ranks:
            rank.terminate()
            rank.join()
