"""Rows that are drawn by every rule there is, and what torch draws for them."""

from dataclasses import dataclass

import torch

from worker.kernels.sampling import DrawRules, Draws, Parameters


@dataclass(frozen=True)
class Asks:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


GREEDY = Asks(temperature=0.0)
MANY = [
    GREEDY,
    Asks(seed=1),
    Asks(seed=2, top_k=5),
    Asks(seed=3, top_p=0.7),
    Asks(seed=4, min_p=0.05),
    Asks(seed=5, temperature=2.5, top_k=40, top_p=0.9, min_p=0.01),
    Asks(seed=-1, temperature=0.3),
    Asks(seed=6, temperature=50.0, top_p=0.999),
    Asks(seed=7, top_k=10**7),
    Asks(seed=8, top_k=600),
    Asks(seed=9, top_p=0.0),
    Asks(seed=10, top_p=1 - 1e-9),
]


def draws_of(rows: list[Asks], positions: list[int], vocab_size: int, device: torch.device) -> Draws:
    """Slots in reverse order, so that nobody takes a row for a slot."""
    drawn = [i for i, asks in enumerate(rows) if asks.temperature >= 1e-5]
    top_k = [rows[i].top_k if rows[i].top_k < vocab_size else 0 for i in drawn]
    has_top_p = [rows[i].top_p < 1 for i in drawn]
    rules = DrawRules(
        num_drawn=len(drawn),
        drawn=None if len(drawn) == len(rows) else torch.tensor(drawn, dtype=torch.int64, device=device),
        most_top_k=max(top_k, default=0),
        has_top_p=any(has_top_p),
        has_top_k_with_top_p=all(k > 0 for k, has in zip(top_k, has_top_p, strict=True) if has),
        has_min_p=any(rows[i].min_p > 0 for i in drawn),
    )
    slots = list(reversed(rows))
    integers = torch.tensor([(asks.top_k, asks.seed, 0) for asks in slots])
    floats = torch.tensor([(asks.temperature, asks.top_p, asks.min_p, 0, 0, 1) for asks in slots], dtype=torch.float64)
    parameters = Parameters(integers.to(device), floats.to(device))
    return Draws(
        rules, parameters, torch.arange(len(rows) - 1, -1, -1, device=device), torch.tensor(positions, device=device)
    )
