"""The operations that make tokens out of logits, and what they are told of the rows.

Logits are float32, bfloat16 or float16, contiguous in their last dimension, and never changed. An operation on R rows
of them takes `rows`, int64 [R]: which of the logits' rows these are, None for the first R. No device value is read on
the host of a GPU.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker.kernels.operation import Operation
from worker.kernels.step import SlotTables
from worker.parallel.symmetric import Inboxes

GREEDY_TEMPERATURE = 1e-5
"""Below this a draw would be the most likely token anyway, up to overflow of logits / temperature."""
FAILED = -1
"""In place of a token id: the row has a logit that is NaN or +inf, or none above −inf."""
NUM_INTEGERS, NUM_FLOATS = 3, 6


@dataclass(frozen=True, slots=True)
class Parameters:
    """Sampling parameters, a row a slot; packed, so that rows are chosen in two operations. Each a column [R, 1]."""

    integers: Tensor
    """int64 [R, 3]"""
    floats: Tensor
    """float64 [R, 6]"""

    @classmethod
    def neutral(cls, num_rows: int, device: torch.device) -> "Parameters":
        """Draw from the model's own distribution."""
        floats = torch.zeros(num_rows, NUM_FLOATS, dtype=torch.float64, device=device)
        parameters = cls(torch.zeros(num_rows, NUM_INTEGERS, dtype=torch.int64, device=device), floats)
        for column in (parameters.temperature, parameters.top_p, parameters.repetition_penalty):
            column.fill_(1)
        return parameters

    def select(self, rows: Tensor) -> "Parameters":
        """A copy of these rows, int64 [R]."""
        return Parameters(self.integers.index_select(0, rows), self.floats.index_select(0, rows))

    @property
    def top_k(self) -> Tensor:
        """0 for all."""
        return self.integers[:, 0:1]

    @property
    def seed(self) -> Tensor:
        """The bits of an unsigned number."""
        return self.integers[:, 1:2]

    @property
    def num_prompt_tokens(self) -> Tensor:
        return self.integers[:, 2:3]

    @property
    def temperature(self) -> Tensor:
        return self.floats[:, 0:1]

    @property
    def top_p(self) -> Tensor:
        return self.floats[:, 1:2]

    @property
    def min_p(self) -> Tensor:
        return self.floats[:, 2:3]

    @property
    def presence_penalty(self) -> Tensor:
        return self.floats[:, 3:4]

    @property
    def frequency_penalty(self) -> Tensor:
        return self.floats[:, 4:5]

    @property
    def repetition_penalty(self) -> Tensor:
        return self.floats[:, 5:6]


@dataclass(frozen=True, slots=True)
class DrawRules:
    """What the host knows of the rows among which tokens are chosen: which work there is at all."""

    num_drawn: int
    """Rows whose token is drawn, the others being greedy."""
    drawn: Tensor | None
    """int64: these; None for all rows."""
    most_top_k: int
    """Largest top_k of a drawn row that is below the vocabulary's size; 0: none restricts anything."""
    has_top_p: bool
    has_top_k_with_top_p: bool
    """Every drawn row with a top_p has a top_k, too."""
    has_min_p: bool


class Draws(NamedTuple):
    """How the tokens of R rows are chosen."""

    rules: DrawRules
    parameters: Parameters
    """Of all slots."""
    slots: Tensor
    """int64 [R]"""
    positions: Tensor
    """int64 [R]: of the new tokens."""


class ChooseKernel(Protocol):
    def __call__(
        self, logits: Tensor, rows: Tensor | None, draws: Draws, remembered: SlotTables | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """A token id for each row, int64 [R], or FAILED. Greedy: the first of the largest logits.

        Otherwise drawn from softmax(logits / temperature), truncated by top-k, then top-p, then min-p, each over what
        the one before left. This comes down to one threshold on a row's logits; tokens that tie with it stay, and the
        most likely always does. A row's draw depends on its logits, parameters, seed and position alone: it is the
        same alone and in any batch.

        The draw is an exponential race: argmax of weight / E with E ~ Exp(1) picks each token with its probability. It
        is run twice, first over the sums of chunks of the vocabulary, then over the chosen chunk's tokens, which is the
        same distribution at 1 / 100 of the random numbers. Implementations agree up to rounding of sums and logarithms.

        `remembered`: where the tokens become the last known ones of their sequences, see `RememberKernel`. `out`, int64
        [R]: where the result goes; this may be pinned memory of the host.
        """


class BestOfRanksKernel(Protocol):
    def __call__(
        self, logits: Tensor, first_token: int, inboxes: Inboxes, slots: Tensor, positions: Tensor,
        remembered: SlotTables,
    ) -> Tensor:  # fmt: skip
        """What `ChooseKernel` makes of greedy rows whose vocabulary is shared over ranks, each of which calls this with
        its part: logits [R, n] of the tokens from `first_token` on, n > 0, the first rank's first. The same int64 [R]
        on all of them. There must be room for R messages of two words (`Inboxes.num_rows`). The rows' slots remember
        their tokens at these positions, int64 [R] each: see `RememberKernel`."""


class MaskedCopyKernel(Protocol):
    def __call__(
        self, logits: Tensor, rows: Tensor | None, num_rows: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A float32 copy [R, V] of these rows with −inf where a bit of `mask` is not set, int32 [R, V / 32 rounded up];
        and bool [R]: the row could be chosen from (FAILED) before that. None allows everything."""


class LogprobsKernel(Protocol):
    def __call__(
        self, logits: Tensor, rows: Tensor | None, token_ids: Tensor, most: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row: the token `token_ids` int64 [R] names (negative: none, any entry will do), then the `most` most
        likely ones in order. (token ids int64, log_softmax(logits) there float32, ranks int64 from 1), each
        [R, 1 + most]. Equal logits all have the best rank of theirs."""


CHOOSE: Operation[None, ChooseKernel] = Operation("choose")
BEST_OF_RANKS: Operation[None, BestOfRanksKernel] = Operation("best_of_ranks")
"""Not of every backend: without it one rank gathers the logits, and chooses for all."""
MASKED_COPY: Operation[None, MaskedCopyKernel] = Operation("masked_copy")
LOGPROBS: Operation[None, LogprobsKernel] = Operation("logprobs")
CHUNK = 256
"""Tokens of the vocabulary that are drawn from together."""
