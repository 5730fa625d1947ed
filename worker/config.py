"""A worker's settings: rules for flags together, and what each part of the worker is told of them."""

import re
from collections.abc import Iterable, Mapping

from pydantic import SecretStr, model_validator

from common.config import is_sendable
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.drafter import Drafter
from worker.core.errors import ConfigError
from worker.core.model_drafter import ModelDrafter
from worker.core.ngram_drafter import NgramDrafter
from worker.executor.peers import PeerSettings
from worker.executor.remote import RemoteRanks
from worker.flags import WorkerFlags
from worker.loader.source import default_served_name
from worker.processes.tcp import MIN_SECRET_LENGTH
from worker.runner.config import RunnerConfig

MAX_NAME_LENGTH = 256
"""Of a served model: names are written in logs and metrics."""
MAX_VERSION_LENGTH = 64
_VERSION = re.compile(rf"[A-Za-z0-9._-]{{0,{MAX_VERSION_LENGTH}}}")


class WorkerSettings(WorkerFlags):
    """Serve one model on one device (or on several, by tensor parallelism) to any number of routers."""

    @model_validator(mode="after")
    def _check(self) -> "WorkerSettings":
        _check_places(self.dp_rank, self.dp_size, self.remote_ranks, self.tensor_parallel_size)
        if self.remote_ranks:
            _check_ranks_secret(self.ranks_secret, needed_by="--remote-ranks")
        if self._has_peers:
            _check_ranks_secret(self.ranks_secret, needed_by="--expert-parallel with --dp-size above 1")
        if self.model_impl == "transformers":
            _check_transformers(
                self.quantization, self.tensor_parallel_size, self.speculative, expert_parallel=self.expert_parallel
            )
        _check_names(self.served_model_name, self.model_version)
        if (self.router_names or self.operator_names) and self.tls_client_ca is None:
            raise ValueError("--router-names and --operator-names need --tls-client-ca")
        _check_keys({"--router-key": self.router_key, "--operator-key": self.operator_key})
        if (self.speculative in ("draft", "eagle3")) != (self.draft_model is not None):
            raise ValueError("--speculative draft or eagle3 and --draft-model go together")
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"--min-ngram {self.min_ngram} is above --max-ngram {self.max_ngram}")
        if self.preemption_mode == "swap" and not self.swap_space_gib:
            raise ValueError("--preemption-mode swap needs --swap-space-gib above 0")
        # The core's own rules, before minutes are spent on loading a model. What only the model can tell is assumed.
        try:
            self.scheduler_config(self.max_model_len or 2)
            self.cache_config(self.num_blocks or 1, int(self.swap_space_gib > 0))
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests call the model; the first is its id, the others are aliases."""
        return tuple(dict.fromkeys(self.served_model_name)) or (default_served_name(self.model),)

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        """Raises ConfigError."""
        return SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            scheduling_policy=self.scheduling_policy,
            scheduler_delay_factor=self.scheduler_delay_factor,
            decode_quota=self.decode_quota,
            max_prefill_chunk=self.max_prefill_chunk or 0,
            preemption_mode=self.preemption_mode,
            preemption_policy=self.preemption_policy,
            watermark=self.watermark,
            max_num_waiting=self.max_num_waiting,
            async_depth=self.async_depth,
            num_speculative_tokens=self.num_drafts,
        )

    @property
    def num_drafts(self) -> int:
        """Most drafts of a sequence in one step; 0: no speculation."""
        return 0 if self.speculative == "none" else self.num_speculative_tokens

    @property
    def async_depth(self) -> int:
        """With drafts, a step is planned when it is known which of the one before were right."""
        return int(self.async_scheduling and not self.num_drafts)

    def drafter(self) -> Drafter | None:
        match self.speculative:
            case "ngram":
                return NgramDrafter(self.min_ngram, self.max_ngram)
            case "draft" | "eagle3" | "mtp":
                return ModelDrafter()
            case _:
                return None

    def cache_config(
        self, num_blocks: int, num_host_blocks: int, num_groups: int = 0, num_checkpoints: int = 0
    ) -> CacheConfig:
        """Raises ConfigError."""
        return CacheConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=self.reuses_prefixes(num_groups, num_checkpoints),
            prefix_index=self.prefix_index,
            secure=self.secure_kv,
            num_groups=num_groups,
            num_checkpoints=num_checkpoints,
        )

    def reuses_prefixes(self, num_groups: int, num_checkpoints: int) -> bool:
        """Not where a model has state groups and no state is kept: what is cached of a prefix is then not enough."""
        return self.enable_prefix_caching and (num_groups == 0 or num_checkpoints > 0)

    def runner_config(self) -> RunnerConfig:
        return RunnerConfig(
            model=self.model,
            model_impl=self.model_impl,
            load_format=self.load_format,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device,
            kernel_backend=self.kernel_backend,
            enforce_eager=self.enforce_eager,
            tensor_parallel_size=self.tensor_parallel_size,
            expert_parallel=self.expert_parallel,
            dp_rank=self.dp_rank if self._has_peers else 0,
            dp_size=self.dp_size if self._has_peers else 1,
            num_threads=self.num_threads,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_speculative_tokens=self.num_drafts,
            draft_model=self.draft_model,
            drafter=None if self.speculative == "none" or self.speculative == "ngram" else self.speculative,
            num_blocks=self.num_blocks,
            kv_cache_gib=self.kv_cache_gib,
            gpu_memory_utilization=self.gpu_memory_utilization,
            swap_space_gib=self.swap_space_gib,
            num_state_checkpoints=self.num_state_checkpoints if self._keeps_states else 0,
        )

    @property
    def _keeps_states(self) -> bool:
        """In secure mode nothing is kept that is not cleared."""
        return self.enable_prefix_caching and not self.secure_kv

    def remote(self) -> RemoteRanks | None:
        if not self.remote_ranks:
            return None
        secret = self.ranks_secret.get_secret_value().encode()
        return RemoteRanks(count=self.remote_ranks, host=self.ranks_host, port=self.ranks_port, secret=secret)

    @property
    def _has_peers(self) -> bool:
        """Workers that it steps together with."""
        return self.expert_parallel and self.dp_size > 1

    def peers(self) -> PeerSettings | None:
        if not self._has_peers:
            return None
        return PeerSettings(
            host=self.dp_host,
            port=self.dp_port,
            secret=self.ranks_secret.get_secret_value().encode(),
            stop_seconds=self.drain_timeout,
        )


def keys_of(secret: SecretStr) -> frozenset[str]:
    """Several, so that a new one can be given out before the old one is taken away."""
    keys = (key.strip() for key in secret.get_secret_value().split(","))
    return frozenset(key for key in keys if key)


def _check_places(dp_rank: int, dp_size: int, remote_ranks: int, tensor_parallel_size: int) -> None:
    """Of this worker among others, and of its ranks on other hosts among all of them."""
    if dp_rank >= dp_size:
        raise ValueError(f"--dp-rank {dp_rank} is not below --dp-size {dp_size}")
    if remote_ranks >= tensor_parallel_size:
        raise ValueError(
            f"--remote-ranks {remote_ranks} is not below --tensor-parallel-size {tensor_parallel_size}: "
            "rank 0 is this worker's own"
        )


def _check_transformers(
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


def _check_names(names: Iterable[str], version: str) -> None:
    """Of the model, and of its version."""
    for name in names:
        if not name.isprintable() or len(name) > MAX_NAME_LENGTH:
            raise ValueError(f"--served-model-name: {name!r} is not printable or longer than {MAX_NAME_LENGTH}")
    if not _VERSION.fullmatch(version):
        raise ValueError(
            f"--model-version: {version!r} has more than {MAX_VERSION_LENGTH} characters, or others than letters, "
            "digits, and . _ -"
        )


def _check_keys(secrets: Mapping[str, SecretStr]) -> None:
    """What callers show, by flag."""
    for flag, secret in secrets.items():
        if any(len(key) < MIN_SECRET_LENGTH or not is_sendable(key) for key in keys_of(secret)):
            raise ValueError(f"{flag}: must be at least {MIN_SECRET_LENGTH} printable ASCII characters, no blanks")


def _check_ranks_secret(secret: SecretStr, *, needed_by: str) -> None:
    """What ranks, and workers that step together, show each other."""
    if len(secret.get_secret_value()) < MIN_SECRET_LENGTH:
        raise ValueError(f"{needed_by} needs a --ranks-secret of at least {MIN_SECRET_LENGTH} characters")
