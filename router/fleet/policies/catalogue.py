"""The policies by the names that settings have for them."""

import random

from router.config import PolicyName
from router.fleet.policies.chance import PowerOfTwo, RandomChoice
from router.fleet.policies.consistent_hash import ConsistentHash, KeyFirst
from router.fleet.policies.least_loaded import LeastLoaded
from router.fleet.policies.policy import Policy
from router.fleet.policies.prefix_aware import PrefixAware
from router.fleet.policies.round_robin import RoundRobin
from router.fleet.prefixes.prefixes import Prefixes


def make_policy(name: PolicyName, prefixes: Prefixes, rng: random.Random | None = None) -> Policy:
    """Whatever its name, requests with a `routing_key` go by that."""
    return KeyFirst(_make(name, prefixes, rng or random.Random()))


def goes_by_prefix(name: PolicyName) -> bool:
    """Only then must the `prefixes` be fed."""
    return name in ("prefix", "prefix_history")


def _make(name: PolicyName, prefixes: Prefixes, rng: random.Random) -> Policy:
    match name:
        case "prefix" | "prefix_history":
            return PrefixAware(prefixes, rng)
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
