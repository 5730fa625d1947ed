"""From a model's checkpoint to its layers for multi-token prediction."""

import logging
from dataclasses import replace

from worker.attention.interface import make_builders
from worker.lap_watch import LapWatch
from worker.layers.setup import LayerSetup
from worker.loader.config import ModelConfig
from worker.loader.errors import ModelConfigError
from worker.loader.open import with_experts_as_stored
from worker.models.base import CausalLM
from worker.models.registry import MTP_KINDS, create_mtp
from worker.models.weights import pack_weights
from worker.runner.config import RunnerConfig
from worker.runner.drafting.drafting import DraftModel
from worker.runner.load import OpenedModel, fill, has_experts
from worker.runner.memory import GIB

logger = logging.getLogger(__name__)


def load_mtp(
    opened: OpenedModel, config: RunnerConfig, setup: LayerSetup, model: CausalLM, max_model_len: int, watch: LapWatch
) -> tuple[DraftModel, int]:
    """The layers for multi-token prediction of `model`, no more than there can be drafts, and the bytes of their
    weights. Raises ModelError."""
    model_config = opened.config
    if not isinstance(model_config, ModelConfig) or model_config.architecture not in MTP_KINDS:
        raise ModelConfigError(
            f"{model_config.architecture} has no layer for multi-token prediction that is implemented "
            f"({', '.join(MTP_KINDS)})"
        )
    stored = MTP_KINDS[model_config.architecture].stored(model_config.num_layers)
    num_stored = 1 if opened.checkpoint is None else stored.num_stored(list(opened.checkpoint.names()))
    prefixes = stored.prefixes(min(num_stored, config.num_speculative_tokens))
    copies = tuple(prefix + name for prefix in prefixes for name in stored.copies)
    model_config = replace(model_config, max_model_len=max_model_len, skipped_weights=copies)
    if opened.checkpoint is not None:
        model_config = with_experts_as_stored(model_config, opened.checkpoint, prefixes)
    head = create_mtp(model_config, setup, model, len(prefixes), config.max_num_batched_tokens)
    fill(head, opened.checkpoint, model_config, config.seed, setup, prefixes)
    num_bytes = pack_weights(head)
    watch.lap("layers for drafts")
    if setup.tp.rank == 0:
        logger.info("drafts by %s, weights %.2f GiB", ", ".join(f"{name}*" for name in prefixes), num_bytes / GIB)
    builders = make_builders(head.cache_layers(), setup.kernels, config.block_size)
    return DraftModel(head, builders, has_spread_experts=setup.dp.size > 1 and has_experts(head)), num_bytes
