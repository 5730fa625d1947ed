"""Rules for ranks, names and secrets among a worker's settings. All raise ValueError, with the flag."""

import re
from collections.abc import Iterable, Mapping

from pydantic import SecretStr

from common.config import is_sendable
from worker.processes.tcp import MIN_SECRET_LENGTH

MAX_NAME_LENGTH = 256
"""Of a served model: names are written in logs and metrics."""
MAX_VERSION_LENGTH = 64
_VERSION = re.compile(rf"[A-Za-z0-9._-]{{0,{MAX_VERSION_LENGTH}}}")
SECRET_ADVICE = (
    f"Of several, separated by commas, all do. At least {MIN_SECRET_LENGTH} characters. Better in the environment: "
    "flags can be seen by others."
)


def keys_of(secret: SecretStr) -> frozenset[str]:
    """Several, so that a new one can be given out before the old one is taken away."""
    keys = (key.strip() for key in secret.get_secret_value().split(","))
    return frozenset(key for key in keys if key)


def check_places(dp_rank: int, dp_size: int, remote_ranks: int, tensor_parallel_size: int) -> None:
    """Of this worker among others, and of its ranks on other hosts among all of them."""
    if dp_rank >= dp_size:
        raise ValueError(f"--dp-rank {dp_rank} is not below --dp-size {dp_size}")
    if remote_ranks >= tensor_parallel_size:
        raise ValueError(
            f"--remote-ranks {remote_ranks} is not below --tensor-parallel-size {tensor_parallel_size}: "
            "rank 0 is this worker's own"
        )


def check_transformers(
    quantization: str, tensor_parallel_size: int, speculative: str, *, expert_parallel: bool
) -> None:
    """Of a model that `transformers` computes: what only layers of ours can."""
    for flag, value, is_possible in (
        ("quantization", quantization, quantization in ("auto", "none")),
        ("tensor-parallel-size", tensor_parallel_size, tensor_parallel_size == 1),
        ("expert-parallel", "on", not expert_parallel),
        ("speculative", speculative, speculative not in ("eagle3", "mtp")),
    ):
        if not is_possible:
            raise ValueError(f"--{flag}: {value} needs layers of fissile's own, not --model-impl transformers")


def check_names(names: Iterable[str], version: str) -> None:
    """Of the model, and of its version."""
    for name in names:
        if not name.isprintable() or len(name) > MAX_NAME_LENGTH:
            raise ValueError(f"--served-model-name: {name!r} is not printable or longer than {MAX_NAME_LENGTH}")
    if not _VERSION.fullmatch(version):
        raise ValueError(
            f"--model-version: {version!r} has more than {MAX_VERSION_LENGTH} characters, or others than letters, "
            "digits, and . _ -"
        )


def check_keys(secrets: Mapping[str, SecretStr]) -> None:
    """What callers show, by flag."""
    for flag, secret in secrets.items():
        if any(len(key) < MIN_SECRET_LENGTH or not is_sendable(key) for key in keys_of(secret)):
            raise ValueError(f"{flag}: must be at least {MIN_SECRET_LENGTH} printable ASCII characters, no blanks")


def check_ranks_secret(secret: SecretStr, *, needed_by: str) -> None:
    """What ranks, and workers that step together, show each other."""
    if len(secret.get_secret_value()) < MIN_SECRET_LENGTH:
        raise ValueError(f"{needed_by} needs a --ranks-secret of at least {MIN_SECRET_LENGTH} characters")
