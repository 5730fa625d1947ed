"""How checkpoints have layers for multi-token prediction."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMtp:
    """How those of a family have them."""

    prefix: str
    """Beginning of the names of its tensors; where there may be several such layers, `{}` stands for the number."""
    names: tuple[tuple[str, str], ...] = ()
    """Beginnings of names in `MtpLayer`, and what stands behind the prefix for each; the first that fits counts."""
    copies: tuple[str, ...] = ()
    """Beginnings of names, behind the prefix, of the model's embedding and head."""

    def prefixes(self, num_layers: int) -> tuple[str, ...]:
        return tuple(self.prefix.format(number) for number in range(num_layers))

    def num_stored(self, names: Collection[str]) -> int:
        """Layers of which there are tensors."""
        num = 0
        while "{}" in self.prefix and any(name.startswith(self.prefix.format(num)) for name in names):
            num += 1
        return max(num, 1)


def behind_the_last(num_layers: int) -> StoredMtp:
    return StoredMtp(prefix=f"model.layers.{num_layers}.", copies=("embed_tokens.", "shared_head.head."))


def as_qwen_has_it(_num_layers: int) -> StoredMtp:
    return StoredMtp(
        prefix="mtp.",
        names=(
            ("eh_proj.", "fc."),
            ("enorm.", "pre_fc_norm_embedding."),
            ("hnorm.", "pre_fc_norm_hidden."),
            ("shared_head.norm.", "norm."),
            ("mlp.shared_experts.", "layers.0.mlp.shared_expert."),
            ("", "layers.0."),
        ),
    )


def as_mimo_has_it(_num_layers: int) -> StoredMtp:
    return StoredMtp(
        prefix="model.mtp.layers.{}.",
        names=(
            ("shared_head.norm.", "final_layernorm."),
            ("post_attention_layernorm.", "pre_mlp_layernorm."),
            ("self_attn.sinks", "self_attn.attention_sink_bias"),
        ),
    )
