"""From declared needs and a byte budget to counts."""

import pytest

from worker.core.cache.pools import PoolBudgetError, PoolKind, PoolPlan, PoolSpec, plan_pools

PAGE = PoolSpec(PoolKind.PAGE, 100)
STATE = PoolSpec(PoolKind.STATE, 30, entries_per_request=2)


@pytest.mark.parametrize(
    ("specs", "num_bytes", "plan"),
    [
        ([PAGE], 1050, PoolPlan(10, 0, 1000, 0)),
        ([PAGE, PoolSpec(PoolKind.PAGE, 50)], 1050, PoolPlan(7, 0, 1050, 0)),
        ([PAGE, STATE], 1050, PoolPlan(8, 4, 800, 240)),
        ([STATE], 1050, PoolPlan(0, 4, 0, 240)),
    ],
)
def test_state_first_blocks_get_the_rest(specs: list[PoolSpec], num_bytes: int, plan: PoolPlan) -> None:
    assert plan_pools(specs, num_bytes, max_num_seqs=4) == plan


def test_refusal_names_the_bytes_that_would_do() -> None:
    with pytest.raises(PoolBudgetError) as error:
        plan_pools([PAGE, STATE], 339, max_num_seqs=4)
    assert error.value.num_bytes_needed == 340
