"""The shape of one step on the host, and the buffers on the device that hold everything else about it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row that is not uniform: the host knows where it stands."""

    num_tokens: int
    context_len: int
    """Tokens of the row in the cache once this step's are written, these included."""


@dataclass(frozen=True, slots=True)
class Round:
    """What data-parallel ranks that share experts know of the steps that they make together, one each."""

    num_tokens: int
    """Of the largest."""
    is_uniform: bool
    """All rows of all of them are uniform, of one token."""
    num_drafts: int = 0
    """Most of a row."""
    num_drafted_rows: int = 0
    """Rows with drafts, of the step that has most of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the host knows of a step: its rows are `num_uniform_rows` of `uniform_len` tokens each, then the chunks.

    A uniform row ends at the last token that the device knows of its sequence (decode, or verification of drafts).
    Where that is, only the device knows: a step is prepared before the host has seen the last one's tokens.
    """

    num_uniform_rows: int
    uniform_len: int = 1
    chunks: tuple[Chunk, ...] = ()
    max_context_len: int
    """Upper bound over all rows."""
    num_padding_rows: int = 0
    """The last so many uniform rows are padding, on the spare slot: they write nothing and have no context."""
    round: Round | None = None
    """None: this rank makes its steps alone."""
    num_rows: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_rows", self.num_uniform_rows + len(self.chunks))
        num_tokens = self.num_uniform_tokens + sum(chunk.num_tokens for chunk in self.chunks)
        object.__setattr__(self, "num_tokens", num_tokens)

    @property
    def num_uniform_tokens(self) -> int:
        return self.num_uniform_rows * self.uniform_len

    @property
    def num_exchanged(self) -> int | None:
        """See `ForwardContext`. Of uniform rounds that are padded to a graph's size, all ranks' steps are."""
        return None if self.round is None else max(self.num_tokens, self.round.num_tokens)


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Allocated once, never moved; a step fills the beginning of each. T tokens, R rows, uniform rows first."""

    input_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]"""
    token_slots: Tensor
    """int64 [T]: block × block_size + offset in the block, where a token's cache entry goes; −1 writes nothing."""
    query_starts: Tensor
    """int32 [R + 1]: first token of each row, then the number of tokens. The first is 0 from the start."""
    context_lens: Tensor
    """int32 [R]: tokens of the row in the cache once this step's are written; 0 for padding."""
    next_positions: Tensor
    """int64 [R]: where the row's next token will stand, which is `context_lens` as an index."""
    block_tables: Tensor
    """int32 [R, most blocks]. Entries past a row's context are undefined but valid blocks."""
    groups: Tensor
    """int64 [R]: group of per-request state."""
    spare_block: int
    """The cache's last block, which is nobody's."""

    @classmethod
    def allocate(
        cls, max_tokens: int, max_rows: int, max_blocks: int, spare_block: int, device: torch.device
    ) -> "StepBuffers":
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            input_ids=zeros(max_tokens, dtype=torch.int64),
            positions=zeros(max_tokens, dtype=torch.int64),
            token_slots=zeros(max_tokens, dtype=torch.int64),
            query_starts=zeros(max_rows + 1, dtype=torch.int32),
            context_lens=zeros(max_rows, dtype=torch.int32),
            next_positions=zeros(max_rows, dtype=torch.int64),
            block_tables=zeros(max_rows, max_blocks, dtype=torch.int32),
            groups=zeros(max_rows, dtype=torch.int64),
            spare_block=spare_block,
        )


@dataclass(frozen=True, slots=True)
class SlotTables:
    """What the device knows of each sequence, a row a slot; the last row is the spare slot, which is nobody's."""

    tokens: Tensor
    """int32 [slots + 1, most tokens]: by position. Those of an earlier owner may stand behind `lengths`."""
    lengths: Tensor
    """int64 [slots + 1]: tokens known, computed or not."""
    block_tables: Tensor
    """int32 [slots + 1, most blocks]"""
    groups: Tensor
    """int64 [slots + 1]: group of per-request state; the spare group where there is none."""

    @property
    def spare_slot(self) -> int:
        return len(self.lengths) - 1


@dataclass(frozen=True, slots=True)
class StagedRows:
    """A step's rows as they came from the host, on the device; int64 [R]."""

    slots: Tensor
    starts: Tensor
    """Position of a chunk's first token; of no meaning for uniform rows."""
    lens: Tensor
