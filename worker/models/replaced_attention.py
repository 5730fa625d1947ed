"""Our attention in the place of that of a model of `transformers`, whose layers call what is registered by a name.

What each layer's attention is, only its calls tell. So it is learnt from a pass in which a stand-in answers; and such
passes show whether anything else than attention connects one token to another.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from worker.kernels.gqa import GqaSpec
from worker.layers.attention import GqaAttention
from worker.layers.setup import LayerSetup
from worker.loader.errors import ModelConfigError

PAGED, PROBED = "fissile", "fissile_probe"
CACHE_LAYER = "fissile_cache_layer"
"""Name of the child that an attention module gets, which does its work."""
PROBE_TOKENS = 8
MAX_DIFFERENCE = 0.05
"""Of a token's hidden state, relatively, with and without the tokens before it; rounding is below, in all types."""
IGNORED = frozenset({"position_ids", "position_embeddings", "cache_position", "sliding_window"})
"""Arguments that say nothing new: positions are in queries and keys already, windows in the mask."""


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """The interface of `transformers`: query [1, H, T, D], key [1, K, T, D], value [1, K, T, E] → [1, T, H, E]. All
    rows of a step stand behind each other; the forward context says which is which."""
    by_token = [x[0].transpose(0, 1).flatten(1) for x in (query, key, value)]
    mixed: Tensor = module.get_submodule(CACHE_LAYER)(torch.cat(by_token, -1))
    return mixed.view(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(PAGED, paged_attention)


class Body(Protocol):
    """A model of `transformers`, from token ids to the last hidden states."""

    def __call__(self, *, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any: ...


def replace_attention(model: PreTrainedModel, body: Body, setup: LayerSetup, num_layers: int, max_len: int) -> None:
    """`body` is that of `model`. Raises ModelConfigError for what cannot be."""
    probe = AttentionProbe(setup, max_len)
    AttentionInterface.register(PROBED, probe.attend)
    AttentionMaskInterface.register(PROBED, probe.mask)
    model.set_attn_implementation(PROBED)
    places = torch.arange(min(PROBE_TOKENS, max_len), device=setup.device)
    half = len(places) // 2
    whole, alone = probe.run(body, places), probe.run(body, places[half:])
    if len(probe.layers) != num_layers:
        raise ModelConfigError(
            f"{len(probe.layers)} attention layers can be replaced, num_hidden_layers is {num_layers}: all must be"
        )
    difference = (whole[half:] - alone).float().norm(dim=-1) / alone.float().norm(dim=-1)
    if difference.median() > MAX_DIFFERENCE:
        raise ModelConfigError(
            "tokens know of others not by attention alone, or do not obey their positions; models with a state or a "
            "convolution are not supported"
        )
    for module, layer in probe.layers.items():
        module.add_module(CACHE_LAYER, layer)
    model.set_attn_implementation(PAGED)


class AttentionProbe:
    """Answers for attention in passes over one text."""

    def __init__(self, setup: LayerSetup, max_model_len: int) -> None:
        self._setup, self._max_model_len = setup, max_model_len
        self._windows: list[tuple[Tensor, int | None]] = []
        """Masks that were made, which layers get as they are."""
        self.layers: dict[nn.Module, GqaAttention] = {}
        """What each attention module shall call, in the order of their calls."""

    def run(self, body: Body, places: Tensor) -> Tensor:
        """A pass, which begins anew. int64 [T], tokens and positions at once → [T, hidden]."""
        self.layers.clear()
        self._windows.clear()
        output = body(input_ids=places[None], position_ids=places[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def mask(self, *, mask_function: Callable[..., Tensor], **_: Any) -> Tensor:
        """Stands for a mask: layers get it as it is. Raises ModelConfigError."""
        mask = torch.zeros(1, 1, 1, 1, device=self._setup.device)
        self._windows.append((mask, self.window(mask_function)))
        return mask

    def window(self, mask_function: Callable[..., Tensor]) -> int | None:
        """Of a mask, from some of its rows: the window it stands for; None: it is causal, in the contexts there can be.
        Raises ModelConfigError for any other mask."""
        last = self._max_model_len - 1
        longest = self._seen(mask_function, last)
        for at in {0, last // 3, last // 2, max(last - 1, 0)}:
            if longest is None or self._seen(mask_function, at) != min(at + 1, longest):
                raise ModelConfigError("a layer has a mask that is neither causal nor that of a window")
        return None if longest == last + 1 else longest

    def _seen(self, mask_function: Callable[..., Tensor], at: int) -> int | None:
        """How many tokens the one at that place sees, itself included; None: not just the last ones."""
        places = torch.arange(self._max_model_len, device=self._setup.device)
        visible = mask_function(places[0], places[0], places[at], places).expand(len(places))
        number = int(visible.sum())
        return number if 0 < number <= at + 1 and bool(visible[at + 1 - number : at + 1].all()) else None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """What a token makes of itself alone, its position included."""
        asked = [name for name, given in others.items() if isinstance(given, Tensor) or given]
        if is_causal is False or set(asked) - IGNORED:
            named = ", ".join(sorted(set(asked) - IGNORED)) or "is_causal=False"
            raise ModelConfigError(f"a layer's attention asks for {named}, which is not supported")
        if module in self.layers:
            raise ModelConfigError("a layer's attention is called twice; each call needs a cache of its own")
        windows = [window for mask, window in self._windows if mask is attention_mask]
        if not windows:
            raise ModelConfigError("a layer has a mask that is not made by transformers' mask interface")
        _, num_heads, _, head_dim = query.shape
        value_dim = value.shape[3]
        spec = GqaSpec(
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            scale=head_dim**-0.5 if scaling is None else scaling,
            dtype=self._setup.dtype,
            window=windows[0],
            has_sinks=s_aux is not None,
            v_head_dim=None if value_dim == head_dim else value_dim,
        )
        self.layers[module] = GqaAttention(self._setup, self._setup.with_cache(spec), None, None, s_aux)
        mixed = value.repeat_interleave(num_heads // key.shape[1], 1) + query.mean(-1, keepdim=True)
        return mixed.transpose(1, 2), None
