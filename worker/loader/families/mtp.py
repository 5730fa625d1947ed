"""Layers for multi-token prediction, which checkpoints have behind the model's own: nothing but drafts is made of
them."""

from worker.loader.config import MAX_LAYERS
from worker.loader.fields import Fields

MTP_NAMES = ("mtp.", "model.mtp.")


def mtp_weights(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Beginnings of their names, for `ModelConfig.skipped_weights`: published models have one such layer, whether
    config.json counts it or not. Raises ModelConfigError."""
    num_mtp = fields.integer("num_nextn_predict_layers", 1, least=0, most=MAX_LAYERS)
    return MTP_NAMES + tuple(f"model.layers.{num_layers + i}." for i in range(num_mtp))
