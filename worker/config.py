"""What a worker can be told, by flag or by environment (`FISSILE_WORKER_…`), and nothing else reads either."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from common.config import CommaList, GrpcPort, ServiceSettings
from worker.config_rules import (
    SECRET_ADVICE,
    check_keys,
    check_names,
    check_places,
    check_ranks_secret,
    check_transformers,
)
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.drafter import Drafter
from worker.core.errors import ConfigError
from worker.core.model_drafter import ModelDrafter
from worker.core.ngram_drafter import NgramDrafter
from worker.executor.peers import PeerSettings
from worker.executor.remote import RemoteRanks
from worker.loader.source import default_served_name
from worker.processes.tcp import MIN_SECRET_LENGTH
from worker.runner.config import RunnerConfig

ENV_PREFIX = "FISSILE_WORKER_"


class WorkerSettings(ServiceSettings):
    """Serve one model on one device (or on several, by tensor parallelism) to any number of routers."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX)

    # The model
    model: str = Field(
        "smollm2", description="'smollm2' (built in), a directory, a .gguf file, or a model id of the Hugging Face hub."
    )
    served_model_name: CommaList = Field(
        (),
        description="What requests call the model, several separated by commas: the first is its id, the others are "
        "aliases; unset: the last name of the path without .gguf, or the hub id.",
    )
    model_version: str = Field(
        "",
        description="What this version of the model is called, such as canary; a router's --version-shares goes by it.",
    )
    chat_template: Path | None = Field(None, description="Jinja file in place of the model's own chat template.")
    model_impl: Literal["fissile", "transformers"] = Field(
        "fissile",
        description="Who computes the model: 'transformers' runs any decoder that it knows, on one device, slower.",
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = Field(
        "auto", description="How weights are stored; 'dummy' makes random ones, for performance work."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of what has no flag of its own; 'auto' is float32 on a CPU, the checkpoint's own elsewhere.",
    )
    quantization: Literal["auto", "none", "int8", "int4"] = Field(
        "auto",
        description="Of weights: 'auto' keeps numbers of 4 or 8 bits as stored where kernels read them, 'none' expands "
        "them.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="Type of keys and values in the cache: 'auto' is that of activations, 'fp8' takes a byte a number.",
    )
    max_model_len: int | None = Field(None, ge=1, description="Longest context in tokens; unset: the model's own.")

    # The device
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="What computes; 'auto' is a GPU if there is one."
    )
    kernel_backend: Literal["auto", "native", "torch", "triton", "aiter"] = Field(
        "auto", description="Whose kernels go first."
    )
    enforce_eager: bool = Field(False, description="No CUDA graphs; for looking for faults.")
    tensor_parallel_size: int = Field(1, ge=1, description="Devices that share the model, a process each.")
    expert_parallel: bool = Field(
        False,
        description="Spread experts over all ranks, those of --dp-size workers together; these step together then.",
    )
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads for computing; unset: one a physical core."
    )

    # Ranks on other hosts
    remote_ranks: int = Field(
        0,
        ge=0,
        description="How many of --tensor-parallel-size are started on other hosts (fissile join).",
    )
    ranks_host: str = Field("127.0.0.1", description="Address at which they join; nobody else should reach it.")
    ranks_port: int = Field(29500, ge=0, le=65535, description="Port at which they join; 0 takes a free one.")
    ranks_secret: SecretStr = Field(
        SecretStr(""),
        description=f"What they must know, at least {MIN_SECRET_LENGTH} characters, and workers of --expert-parallel, "
        "too. Better in the environment: flags can be seen by others.",
    )

    # The service
    port: GrpcPort = 50061
    router_names: CommaList = Field(
        (), description="Names (SAN or CN) of routers in their certificates; others of --tls-client-ca are refused."
    )
    operator_names: CommaList = Field((), description="The same of operators, who alone may drain, clear and profile.")
    router_key: SecretStr = Field(
        SecretStr(""), description="Key of routers, their --worker-key; who shows none is refused. " + SECRET_ADVICE
    )
    operator_key: SecretStr = Field(
        SecretStr(""), description="Key of operators, as `authorization: Bearer KEY`. " + SECRET_ADVICE
    )
    channelz: bool = Field(False, description="Tell operators of connections and calls (gRPC).")
    max_output_rate: float | None = Field(
        None, gt=0, description="News of sequences a second to all routers, a message counting as 16 more: above that, "
        "tokens of several steps share one. Unset: 12,000, or on CPUs 500 a core.",
    )  # fmt: skip
    max_queued_messages: int = Field(
        1024, ge=1, description="Messages a router may lag behind before its stream is ended (RESOURCE_EXHAUSTED)."
    )
    drain_timeout: float = Field(
        30.0, ge=0, description="Seconds that running sequences get to finish on shutdown or Drain."
    )

    step_timeout: float = Field(
        600.0, gt=0, description="Seconds after which a step that has not ended counts as a fault of the device."
    )

    # Its place among others
    dp_rank: int = Field(0, ge=0, description="Data-parallel rank, 0 ≤ rank < --dp-size.")
    dp_size: int = Field(1, ge=1, description="Data-parallel ranks.")
    dp_host: str = Field(
        "127.0.0.1",
        description="--expert-parallel: address of --dp-rank 0, where it listens for the others; nobody else should "
        "reach it.",
    )
    dp_port: int = Field(29400, ge=1, le=65535, description="--expert-parallel: the port for that.")

    # Scheduling
    max_num_seqs: int = Field(512, ge=1, description="Most sequences running at a time.")
    max_num_batched_tokens: int = Field(16384, ge=1, description="Token budget of one step.")
    max_num_waiting: int = Field(10_000, ge=1, description="Most sequences waiting; more are refused.")
    scheduling_policy: Literal["prefill_first", "chunked"] = Field(
        "prefill_first", description="prefill_first: lowest time to first token; chunked: smooth time per token."
    )
    max_prefill_chunk: int | None = Field(
        None, ge=1, description="Most prompt tokens of one sequence in one step; unset: the token budget."
    )
    decode_quota: int = Field(
        4, ge=1, description="prefill_first: most prefill steps in a row while other sequences wait to decode."
    )
    scheduler_delay_factor: float = Field(
        0.0, ge=0, description="prefill_first: wait this many times the last prefill's latency before a new prefill."
    )
    preemption_mode: Literal["recompute", "swap"] = Field(
        "recompute", description="What happens to the KV of a sequence that must give up its blocks."
    )
    preemption_policy: Literal["fcfs", "priority", "shortest_remaining", "cheapest_recompute"] = Field(
        "fcfs", description="Which sequence gives up its blocks first; fcfs: the last one admitted."
    )
    async_scheduling: bool = Field(
        True, description="Schedule the next step while the device runs this one; not with --speculative."
    )

    # Speculative decoding
    speculative: Literal["none", "ngram", "draft", "eagle3", "mtp"] = Field(
        "none",
        description="Who drafts tokens for the model to verify several in one step: 'ngram' looks up what followed the "
        "last tokens before, 'draft' asks --draft-model, 'eagle3' a --draft-model that goes on from states of the "
        "model, 'mtp' the model's own layer for multi-token prediction. The same tokens come, sooner where drafts are "
        "right.",
    )
    draft_model: str | None = Field(
        None,
        description="--speculative draft: a small model of the same vocabulary, named as --model is; eagle3: an "
        "EAGLE-3 draft made for the model.",
    )
    num_speculative_tokens: int = Field(4, ge=1, description="Most drafts of a sequence in one step.")
    min_ngram: int = Field(2, ge=1, description="Tokens that must be the last ones for a place to be looked up.")
    max_ngram: int = Field(4, ge=1, description="Of several such places, that where most are, up to so many, counts.")

    # The KV cache
    block_size: int = Field(16, ge=1, description="Tokens per KV block: 1 or a multiple of 16.")
    enable_prefix_caching: bool = Field(True, description="Reuse the KV of equal prefixes.")
    num_state_checkpoints: int = Field(
        32, ge=0, description="States kept to go on from after equal prefixes, of models with recurrent state."
    )
    prefix_index: Literal["hash", "radix"] = Field("hash", description="How equal prefixes are found.")
    watermark: float = Field(0.01, ge=0, lt=1, description="Share of blocks kept free when a sequence is admitted.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of the device's memory to use (GPU).")
    kv_cache_gib: float | None = Field(None, gt=0, description="Size of the KV cache; unset: from free memory.")
    num_blocks: int | None = Field(None, ge=1, description="Size of the KV cache in blocks; wins over --kv-cache-gib.")
    swap_space_gib: float = Field(0.0, ge=0, description="Host memory for swapped sequences.")
    secure_kv: bool = Field(False, description="Clear KV blocks when they are freed.")

    @model_validator(mode="after")
    def _check(self) -> "WorkerSettings":
        check_places(self.dp_rank, self.dp_size, self.remote_ranks, self.tensor_parallel_size)
        if self.remote_ranks:
            check_ranks_secret(self.ranks_secret, needed_by="--remote-ranks")
        if self._has_peers:
            check_ranks_secret(self.ranks_secret, needed_by="--expert-parallel with --dp-size above 1")
        if self.model_impl == "transformers":
            check_transformers(
                self.quantization, self.tensor_parallel_size, self.speculative, expert_parallel=self.expert_parallel
            )
        check_names(self.served_model_name, self.model_version)
        if (self.router_names or self.operator_names) and self.tls_client_ca is None:
            raise ValueError("--router-names and --operator-names need --tls-client-ca")
        check_keys({"--router-key": self.router_key, "--operator-key": self.operator_key})
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
