"""Tokens on their way to experts of other ranks, and back."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from tests.runner.thread_ranks import run_ranks
from worker.parallel.exchange import NO_EXPERT, TokenExchange
from worker.parallel.group import Group

NUM_TOKENS = [3, 0, 1]
HIDDEN, TOP_K = 5, 2


def token(rank: int, number: int) -> float:
    return 10.0 * rank + number


def inputs(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    values = torch.tensor([token(rank, number) for number in range(NUM_TOKENS[rank])])
    x = values[:, None].repeat(1, HIDDEN).to(dtype)
    return x, values[:, None].repeat(1, TOP_K) / 7, values[:, None].repeat(1, TOP_K).long()


def test_every_rank_sees_the_tokens_of_all_and_gets_the_sums_of_its_own() -> None:
    def work(rank: int, group: dist.ProcessGroup, _store: Store) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            exchange = TokenExchange(Group(rank, 3, group))
            x, weights, ids = inputs(rank, dtype)
            all_x, all_weights, all_ids = exchange.gather(x, weights, ids, 4)
            assert all_x.dtype == dtype and all_x.shape == (12, HIDDEN)
            for other in range(3):
                first, num = 4 * other, NUM_TOKENS[other]
                expected = inputs(other, dtype)
                for found, wanted in zip((all_x, all_weights, all_ids), expected, strict=True):
                    assert torch.equal(found[first : first + num], wanted)
                assert all_ids[first + num : first + 4].eq(NO_EXPERT).all()
            # Each adds its share of every token.
            sums = exchange.scatter(all_x * (rank + 1), len(x))
            assert torch.equal(sums, x * 6)

    run_ranks(3, work)


def test_without_a_number_all_have_as_many() -> None:
    def work(rank: int, group: dist.ProcessGroup, _store: Store) -> int:
        x = torch.ones(2, HIDDEN)
        routed = torch.ones(2, TOP_K), torch.zeros(2, TOP_K, dtype=torch.int32)
        gathered, _, ids = TokenExchange(Group(rank, 2, group)).gather(x, *routed, None)
        assert ids.dtype == torch.int32
        return len(gathered)

    assert run_ranks(2, work) == [4, 4]


def test_one_rank_has_nobody_to_exchange_with() -> None:
    x, weights, ids = inputs(0, torch.float32)
    exchange = TokenExchange(Group())
    assert exchange.gather(x, weights, ids, None) == (x, weights, ids)
    assert exchange.scatter(x, len(x)) is x
