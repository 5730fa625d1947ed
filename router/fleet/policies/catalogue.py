"""The policies by the names that settings have for them."""

import random

from router.config import PolicyName
from router.fleet.policies.chance import PowerOfTwo, RandomChoice
from router.fleet.policies.consistent_hash import ConsistentHash, KeyFirst
from router.fleet.policies.least_loaded import LeastLoaded
from router.fleet.policies.policy import Policy
from router.fleet.policies.round_robin import RoundRobin


def make_policy(name: PolicyName, rng: random.Random | None = None) -> Policy:
    """Whatever its name, requests with a `routing_key` go by that."""
    return KeyFirst(_make(name, rng or random.Random()))


def _make(name: PolicyName, rng: random.Random) -> Policy:
    match name:
        case "least_loaded":
            return LeastLoaded()
        case "round_robin":
            return RoundRobin()
        case "random":
            return RandomChoice(rng)
        case "power_of_two":
            return PowerOfTwo(rng)
        case "consistent_hash":
            return ConsistentHash()
