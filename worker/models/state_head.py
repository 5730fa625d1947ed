"""A head that drafts: a layer or two which go on from the hidden states of another model."""

from abc import abstractmethod

from torch import Tensor

from worker.models.base import CausalLM


class StateHead(CausalLM):
    """Predicts from each token, and from a state of the model that predicted it, the token behind it. A pass returns
    states from which further passes can go on, [T, hidden], complete on every rank.

    It has one layer or more, of which each makes a draft in its turn, and the last one all further drafts.
    """

    previous: Tensor
    """[layers, max tokens, hidden]: of each token of a pass, what layers go on from, filled before the pass. Layer k,
    the first being 1, goes on from that one of `states` that stands k tokens before; beyond its turn, the last layer
    goes on from what it returned."""
    turn: int = 0
    """Of which layer, the first being 0, the next pass returns the state. Those behind it keep the pass's tokens, too,
    as their turn comes later; those before it do not."""
    needs_hidden: bool
    """Whether `states` need the model's last hidden states of all tokens."""

    @abstractmethod
    def states(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """[T, hidden]: what to go on from behind each of the `num_tokens` that the model has just taken in. `hidden`:
        the last hidden states that it left, of all tokens where this head needs them; there may be padding."""
