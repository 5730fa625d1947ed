"""From the name of a draft model to layers beside the model that it drafts for."""

import logging
from dataclasses import replace

from worker.attention.interface import make_builders
from worker.lap_watch import LapWatch
from worker.layers.setup import LayerSetup
from worker.loader.config import CommonConfig
from worker.loader.errors import ModelConfigError, ModelError
from worker.runner.config import RunnerConfig
from worker.runner.drafting.drafting import DraftModel
from worker.runner.load import layer_setup, load_model, open_model
from worker.runner.memory import GIB

logger = logging.getLogger(__name__)


def load_draft(
    config: RunnerConfig, target: CommonConfig, like: LayerSetup, max_model_len: int, watch: LapWatch
) -> tuple[DraftModel, int]:
    """The draft model beside `target`, on the devices and in the dtype of `like`, and the bytes of its weights. Raises
    ModelConfigError, with its name."""
    assert config.draft_model is not None
    load_format = config.load_format if config.load_format == "dummy" else "auto"
    own = replace(
        config, model=config.draft_model, model_impl="fissile", load_format=load_format, expert_parallel=False
    )
    try:
        opened = open_model(own)
        check_vocabulary(opened.config, target)
        setup = layer_setup(opened, own, like.kernels, like.tp, like.dtype)
        model, num_bytes = load_model(opened, own, setup, max_model_len, watch)
        builders = make_builders(model.cache_layers(), like.kernels, config.block_size)
    except (ModelError, ValueError) as error:
        raise ModelConfigError(f"draft model {config.draft_model}: {error}") from error
    if like.tp.rank == 0:
        logger.info("draft model %s: %s, weights %.2f GiB", own.model, opened.config.architecture, num_bytes / GIB)
        warn_of_context(own.model, opened.config, max_model_len)
    return DraftModel(model, builders), num_bytes


def check_vocabulary(draft: CommonConfig, target: CommonConfig) -> None:
    """Raises ModelConfigError."""
    if draft.vocab_size != target.vocab_size:
        raise ModelConfigError(
            f"its vocab_size is {draft.vocab_size}, that of the model it drafts for {target.vocab_size}; they must be "
            "equal"
        )


def warn_of_context(name: str, draft: CommonConfig, max_model_len: int) -> None:
    if draft.max_model_len < max_model_len:
        logger.warning(
            "draft model %s is made for %d tokens, and %d are served: beyond its own its drafts are often wrong",
            name, draft.max_model_len, max_model_len,
        )  # fmt: skip
