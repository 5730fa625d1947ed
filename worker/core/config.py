"""Configuration of scheduler and cache. A value that cannot work is refused here, with the one that would."""

from dataclasses import dataclass
from typing import Literal, get_args

from worker.core.errors import ConfigError

SchedulingPolicy = Literal["prefill_first", "chunked"]
PreemptionMode = Literal["recompute", "swap"]
PreemptionPolicy = Literal["fcfs", "priority", "shortest_remaining", "cheapest_recompute"]
PrefixIndexKind = Literal["hash", "radix"]


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise ConfigError(field, message)


def _require_choice(field: str, value: str, choices: object) -> None:
    names = get_args(choices)
    _require(value in names, field, f"is {value!r}; one of {', '.join(names)} is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How tokens are handed out. Raises `ConfigError`."""

    max_model_len: int
    """Most tokens of one sequence, prompt and output."""
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    """Token budget of one step."""
    scheduling_policy: SchedulingPolicy = "prefill_first"
    """`prefill_first` prefills whole prompts (in chunks only if `max_prefill_chunk` is set) in steps of their own;
    `chunked` mixes decodes and chunks of prompts in one step."""
    scheduler_delay_factor: float = 0.0
    """A prefill waits until the head of the queue has waited longer than this × the last prefill step."""
    decode_quota: int = 4
    """Most prefill steps in a row while sequences decode (`prefill_first`)."""
    max_prefill_chunk: int = 0
    """Most prompt tokens of one sequence in one step; 0 leaves only the budget as a bound."""
    preemption_mode: PreemptionMode = "recompute"
    preemption_policy: PreemptionPolicy = "fcfs"
    watermark: float = 0.01
    """Share of the blocks kept free when a new sequence is admitted beside running ones."""
    max_num_waiting: int = 0
    """Bound of the waiting queue; 0 means none."""
    async_depth: int = 1
    """Steps that may be in flight when the next one is scheduled: 0 or 1."""
    num_speculative_tokens: int = 0
    """Most draft tokens of one sequence in one step; 0: no speculation."""

    def __post_init__(self) -> None:
        _require_choice("scheduling_policy", self.scheduling_policy, SchedulingPolicy)
        _require_choice("preemption_mode", self.preemption_mode, PreemptionMode)
        _require_choice("preemption_policy", self.preemption_policy, PreemptionPolicy)
        _require(self.max_model_len >= 2, "max_model_len", f"is {self.max_model_len}; at least 2 is needed")
        _require(self.max_num_seqs >= 1, "max_num_seqs", f"is {self.max_num_seqs}; at least 1 is needed")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            f"is {self.max_num_batched_tokens}, but {self.max_num_seqs} sequences decode a token each in one step; "
            f"at least {self.max_num_seqs} is needed, or max_num_seqs of at most {self.max_num_batched_tokens}",
        )
        _require(
            0 <= self.max_prefill_chunk <= self.max_num_batched_tokens,
            "max_prefill_chunk",
            f"is {self.max_prefill_chunk}; 0 to max_num_batched_tokens ({self.max_num_batched_tokens}) is needed",
        )
        _require(
            self.scheduler_delay_factor >= 0,
            "scheduler_delay_factor",
            f"is {self.scheduler_delay_factor}; at least 0 is needed",
        )
        _require(self.decode_quota >= 1, "decode_quota", f"is {self.decode_quota}; at least 1 is needed")
        _require(0 <= self.watermark < 1, "watermark", f"is {self.watermark}; a share of 0 to below 1 is needed")
        _require(self.max_num_waiting >= 0, "max_num_waiting", f"is {self.max_num_waiting}; 0 or more is needed")
        _require(self.async_depth in (0, 1), "async_depth", f"is {self.async_depth}; 0 or 1 is needed")
        self._check_speculation()

    def _check_speculation(self) -> None:
        num = self.num_speculative_tokens
        _require(num >= 0, "num_speculative_tokens", f"is {num}; 0 or more is needed")
        _require(
            not num or self.async_depth == 0,
            "async_depth",
            f"is {self.async_depth} with num_speculative_tokens {num}: a step is planned once it is known which drafts "
            "of the one before were right; 0 is needed",
        )
        _require(
            not num or self.max_num_batched_tokens >= self.max_num_seqs + num,
            "max_num_batched_tokens",
            f"is {self.max_num_batched_tokens}, but {self.max_num_seqs} sequences decode a token each, and one of them "
            f"{num} drafts more; at least {self.max_num_seqs + num} is needed",
        )

    @property
    def can_chunk(self) -> bool:
        """Whether a new prompt may be prefilled over several steps."""
        return self.scheduling_policy == "chunked" or self.max_prefill_chunk > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV block pool and what hangs on it. Raises `ConfigError`."""

    num_blocks: int
    block_size: int = 16
    """Tokens of one block: 1 or a multiple of 16."""
    num_host_blocks: int = 0
    """Blocks of host memory for swapped sequences."""
    enable_prefix_caching: bool = True
    prefix_index: PrefixIndexKind = "hash"
    secure: bool = False
    """Clear a block's content when it is given up: at the latest before anyone else gets the block."""
    num_groups: int = 0
    """State groups of sequences, of models with recurrent state; 0 if the model has none."""
    num_checkpoints: int = 0
    """Further groups, for states that others go on from: see `checkpoints`."""

    def __post_init__(self) -> None:
        _require_choice("prefix_index", self.prefix_index, PrefixIndexKind)
        lower = max(self.block_size // 16 * 16, 0)
        _require(
            self.block_size == 1 or (self.block_size > 0 and self.block_size % 16 == 0),
            "block_size",
            f"is {self.block_size}; 1 or a multiple of 16 is needed, such as {lower or 1} or {lower + 16}",
        )
        _require(self.num_blocks >= 1, "num_blocks", f"is {self.num_blocks}; at least 1 is needed")
        _require(self.num_host_blocks >= 0, "num_host_blocks", f"is {self.num_host_blocks}; 0 or more is needed")
        _require(self.num_groups >= 0, "num_groups", f"is {self.num_groups}; 0 or more is needed")
        _require(
            not (self.secure and self.num_host_blocks),
            "secure",
            f"is set with num_host_blocks {self.num_host_blocks}: host copies are not cleared; 0 is needed",
        )
        _require(self.num_checkpoints >= 0, "num_checkpoints", f"is {self.num_checkpoints}; 0 or more is needed")
        _require(
            not (self.num_groups and self.enable_prefix_caching and not self.num_checkpoints),
            "enable_prefix_caching",
            "is set for a model with state groups and num_checkpoints is 0; False is needed, or checkpoints",
        )
        _require(
            not self.num_checkpoints or (self.num_groups > 0 and self.enable_prefix_caching and not self.secure),
            "num_checkpoints",
            f"is {self.num_checkpoints}; 0 is needed without state groups, without prefix caching or in secure mode",
        )
        _require(
            not (self.num_groups and self.num_host_blocks),
            "num_host_blocks",
            f"is {self.num_host_blocks} for a model with state groups, which are not swapped; 0 is needed",
        )


def check_together(scheduler: SchedulerConfig, cache: CacheConfig) -> None:
    """Refuses two configs that are sound alone and cannot work together. Raises `ConfigError`."""
    _require(
        scheduler.preemption_mode == "recompute" or cache.num_host_blocks > 0,
        "num_host_blocks",
        "is 0 with preemption_mode 'swap'; at least 1 is needed",
    )
    _require(
        cache.num_groups == 0 or cache.num_groups >= scheduler.max_num_seqs,
        "num_groups",
        f"is {cache.num_groups}; at least max_num_seqs ({scheduler.max_num_seqs}) is needed",
    )
