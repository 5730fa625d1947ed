"""`RunnerConfig`, what a rank is built from, and `ModelInfo`, what it reports. Both pickle. No torch."""

from dataclasses import dataclass
from typing import Literal

from worker.loader.config import CommonConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    model: str = "smollm2"
    """As `worker.loader.source.resolve_model` reads it."""
    model_impl: Literal["fissile", "transformers"] = "fissile"
    """Who computes it: layers of ours, or `transformers` around our attention."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights, activations and cache. auto: float32 on a CPU, the checkpoint's own on a GPU."""
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    """Of weights. auto: numbers of a checkpoint stay as they are stored, where kernels read them."""
    kv_cache_dtype: Literal["auto", "activations", "bfloat16", "int8", "fp8"] = "auto"
    """Of keys and values. auto: that of activations, or int8 beside weights that a CPU has in whole numbers (bfloat16,
    without VNNI or where keys have a bias); int8: with a scale for each token and head; fp8: float8_e4m3, with the
    checkpoint's scales where it has some. Caches of other kinds of attention stay as they are."""
    device: str = "auto"
    """auto, cpu or cuda; rank r of a tensor-parallel group takes cuda:r."""
    kernel_backend: str = "auto"
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    """Experts are spread over the ranks, in place of a part of each on every one."""
    dp_rank: int = 0
    dp_size: int = 1
    """Workers over whose ranks the experts are spread, and which step together."""
    num_threads: int | None = None
    """CPU threads of a rank; None: the physical cores this process may use, divided among the ranks."""
    block_size: int = 16
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    max_model_len: int | None = None
    """None: the model's own."""
    num_speculative_tokens: int = 0
    """Most drafts of a row: for each there are logits in one step."""
    drafter: Literal["draft", "eagle3", "mtp"] | None = None
    """Who proposes all of them: a draft model, an EAGLE-3 layer, which goes on from states of the model, or the model's
    own layer for multi-token prediction; None: they come with the batch."""
    draft_model: str | None = None
    """The first two of these, as `worker.loader.source.resolve_model` reads it."""
    num_blocks: int | None = None
    """Size of the cache in blocks; wins over the sizes below."""
    kv_cache_gib: float | None = None
    """Size of a rank's cache; None: from free memory."""
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    """Nothing of a step is recorded: each operation is launched by itself."""
    swap_space_gib: float = 0.0
    """Host memory of a rank for swapped blocks."""
    num_state_checkpoints: int = 0
    """States that are kept for others to go on from, of a model with recurrent state."""
    seed: int = 0
    """Of dummy weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What went where on rank 0, in bytes."""

    weights: int
    activations: int
    """Peak beyond weights in a dummy step at the largest batch; measured on a GPU, 0 on a CPU."""
    graphs: int
    """Of CUDA graphs, beyond the other parts; measured at the largest."""
    kv_cache: int
    state: int
    """Groups of per-request state."""
    swap: int
    num_cache_tokens: int
    """Tokens that the cache holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What rank 0 reports once it can run steps. Pickles."""

    config: CommonConfig
    dtype: str
    device: str
    kernels: dict[str, str]
    """Operation → what carries it out."""
    block_size: int
    num_blocks: int
    num_groups: int
    """Of per-request state; 0 if the model has none."""
    num_checkpoints: int
    """Further groups, for states that others go on from."""
    num_host_blocks: int
    """For swapping."""
    max_model_len: int
    memory: MemoryReport
