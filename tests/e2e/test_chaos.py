"""Workers, ranks and routers are killed, stopped and cut off while streams run: nothing is lost, doubled or left.

`--soak`: twenty rounds of 200 streams, every kind of fault. Always: one, of the kind that no connection tells of.
"""

import random
from collections.abc import Sequence
from functools import partial

import pytest

from tests.e2e.chaos import FAULTS, WORKER_STOPPED, Fault, Outcome, outcomes, some_asks
from tests.e2e.fleet import Fleet, running_fleet

SEED = 20


def faults_of(outcome: Outcome, whole: Outcome, of_router: bool) -> list[str]:
    """What a client of this answer could complain of. While a worker is left only the loss of its router, which is
    the client's own connection, may end a stream that has begun; what came before is right even then."""
    if not outcome.error:
        return [] if outcome.tokens == whole.tokens else ["other tokens than without a fault"]
    found = [] if of_router and outcome.error == "UNAVAILABLE" else [f"ended with {outcome.error}"]
    begins = all(whole.tokens[index][: len(tokens)] == tokens for index, tokens in outcome.tokens.items())
    return found if begins else [*found, "it began with other tokens"]


def strike_and_compare(fleet: Fleet, num_asks: int, faults: Sequence[Fault]) -> None:
    """One fault after the other; the fleet is whole again after each but the last, and after one of a router, which
    could not say then that nothing is left."""
    rng = random.Random(SEED)
    asks = some_asks(num_asks, SEED)
    oracle = outcomes(fleet, asks)
    assert [outcome.error for outcome in oracle] == [""] * num_asks
    for number, fault in enumerate(faults):
        victim = rng.randrange(len(fleet.routers if fault.of_router else fleet.workers))
        strike = partial(fault.strike, fleet, victim)
        answers = outcomes(fleet, asks, strike, rng.randint(1, num_asks // 2))
        found = {
            at: complaints
            for at, (answer, whole) in enumerate(zip(answers, oracle, strict=True))
            if (complaints := faults_of(answer, whole, fault.of_router))
        }
        assert not found, f"round {number}, {fault.name} {victim}: {found}"
        if fault.of_router or number + 1 < len(faults):
            fleet.restore()
        fleet.wait_until_idle()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_faults_are_not_seen_in_the_answers(fleet, is_soak, tmp_path):
    if not is_soak:
        strike_and_compare(fleet, 60, [WORKER_STOPPED])
        return
    with running_fleet(tmp_path, num_workers=3, num_routers=2) as larger:
        strike_and_compare(larger, 200, [FAULTS[number % len(FAULTS)] for number in range(20)])
