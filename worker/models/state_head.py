"""A head that drafts: a layer or two which go on from the hidden states of another model."""

from abc import abstractmethod

from torch import Tensor

from worker.models.base import CausalLM


class StateHead(CausalLM):
    """Predicts from each token, and from a state of the model that predicted it, the token behind it. A pass returns
    states from which further passes can go on, [T, hidden], complete on every rank."""

    previous: Tensor
    """[max tokens, hidden]: of each token of a pass, the state that it was predicted from: one of `states`, or what a
    pass of this module returned. Filled before a pass."""
    needs_hidden: bool
    """Whether `states` need the model's last hidden states of all tokens."""

    @abstractmethod
    def states(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """[T, hidden]: what to go on from behind each of the `num_tokens` that the model has just taken in. `hidden`:
        the last hidden states that it left, of all tokens where this head needs them; there may be padding."""
