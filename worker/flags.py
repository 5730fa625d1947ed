"""What a worker can be told, by flag or by environment (`FISSILE_WORKER_…`), and nothing else reads either."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from common.config import CommaList, GrpcPort, ServiceSettings
from worker.processes.tcp import MIN_SECRET_LENGTH

SECRET_ADVICE = (
    f"Of several, separated by commas, all do. At least {MIN_SECRET_LENGTH} characters. Better in the environment: "
    "flags can be seen by others."
)


class WorkerFlags(ServiceSettings):
    """Each with its type, range and description; what they mean together is `worker.config.WorkerSettings`."""

    model_config = SettingsConfigDict(env_prefix="FISSILE_WORKER_")

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
    kv_cache_dtype: Literal["auto", "activations", "bfloat16", "int8", "fp8"] = Field(
        "auto",
        description="Type of keys and values in the cache: 'auto' is that of activations, or int8 on a CPU beside "
        "weights of 4 or 8 bits (bfloat16 without VNNI, or where keys have a bias); 'int8' and 'fp8' take a byte a "
        "number.",
    )
    max_model_len: int | None = Field(None, ge=1, description="Longest context in tokens; unset: the model's own.")

    # The device
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="What computes; 'auto' is a GPU if there is one."
    )
    kernel_backend: Literal["auto", "native", "torch", "triton", "aiter"] = Field(
        "auto", description="Whose kernels go first."
    )
    enforce_eager: bool = Field(False, description="No recorded steps (CUDA graphs, tapes); for looking for faults.")
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
        "tokens of several steps share one. Unset: 12,000, or on CPUs 200 a core.",
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
