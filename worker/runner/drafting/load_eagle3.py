"""From the name of an EAGLE-3 draft to a head beside the model whose states it goes on from."""

import logging
from dataclasses import replace

import torch
from torch import Tensor

from worker.attention.interface import make_builders
from worker.lap_watch import LapWatch
from worker.layers.kept_states import KeptStates
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import Checkpoint
from worker.loader.config import CommonConfig, ModelConfig
from worker.loader.errors import ModelConfigError, ModelError, WeightsError
from worker.loader.families.eagle3 import Eagle3Config, load_eagle3_config
from worker.loader.model_part import ModelPart
from worker.loader.open import open_checkpoint
from worker.loader.source import resolve_model
from worker.models.base import CausalLM
from worker.models.deepseek import DeepseekForCausalLM
from worker.models.dense import DecoderForCausalLM
from worker.models.eagle3 import Eagle3Head
from worker.models.weights import pack_weights
from worker.runner.config import RunnerConfig
from worker.runner.drafting.drafting import DraftModel
from worker.runner.drafting.load_draft import check_vocabulary, warn_of_context
from worker.runner.load import OpenedModel, fill, layer_setup
from worker.runner.memory import GIB

logger = logging.getLogger(__name__)
MAP = "d2t"


def load_eagle3(
    config: RunnerConfig, target: CommonConfig, like: LayerSetup, model: CausalLM, max_model_len: int, watch: LapWatch
) -> tuple[DraftModel, int]:
    """The draft of `model`, on the devices and in the dtype of `like`, and the bytes of its weights; `model` keeps the
    states that it needs from now on. Raises ModelConfigError, with its name."""
    try:
        head, num_bytes = _load(config, target, like, model, max_model_len)
    except (ModelError, ValueError) as error:
        raise ModelConfigError(f"draft model {config.draft_model}: {error}") from error
    watch.lap("layer for drafts")
    return DraftModel(head, make_builders(head.cache_layers(), like.kernels, config.block_size)), num_bytes


def _load(
    config: RunnerConfig, target: CommonConfig, like: LayerSetup, model: CausalLM, max_model_len: int
) -> tuple[Eagle3Head, int]:
    assert config.draft_model is not None
    if not isinstance(target, ModelConfig) or not isinstance(model, DecoderForCausalLM | DeepseekForCausalLM):
        raise ModelConfigError(f"{target.architecture} is computed by `transformers`, which keeps no states of layers")
    opened = _open(config, config.draft_model)
    eagle, checkpoint = opened.config, opened.checkpoint
    assert isinstance(eagle, Eagle3Config)
    _check(eagle, target)
    places, token_ids = eagle.places(target.num_layers), _token_ids(eagle, checkpoint)
    own = replace(config, expert_parallel=False)
    setup = layer_setup(opened, own, like.kernels, like.tp, like.dtype)
    kept = KeptStates(setup, places, target.num_layers, target.hidden_size, config.max_num_batched_tokens)
    model.model.keep_states(kept)
    head = Eagle3Head(replace(eagle, max_model_len=max_model_len), setup, model, kept)
    fill(head, checkpoint, eagle, config.seed, setup)
    head.token_ids = None if token_ids is None else token_ids.to(setup.device)
    num_bytes = pack_weights(head)
    if like.tp.rank == 0:
        logger.info(
            "draft model %s: %s, from the states behind %s layers of the model, weights %.2f GiB",
            config.draft_model, eagle.architecture, ", ".join(map(str, places)), num_bytes / GIB,
        )  # fmt: skip
        warn_of_context(config.draft_model, eagle, max_model_len)
    return head, num_bytes


def _open(config: RunnerConfig, name: str) -> OpenedModel:
    """Raises ModelError."""
    source = resolve_model(name)
    eagle = load_eagle3_config(source)
    if eagle.quantized is not None:
        eagle = replace(eagle, quantized=replace(eagle.quantized, has_cache_scales=False))  # nobody reads them
    if config.load_format == "dummy":
        return OpenedModel(source, None, replace(eagle, has_embedding=True, has_head=True))
    checkpoint = open_checkpoint(source, eagle)
    names = set(ModelPart(checkpoint, eagle).names())
    eagle = replace(eagle, has_embedding="embed_tokens.weight" in names, has_head="lm_head.weight" in names)
    return OpenedModel(source, checkpoint, eagle)


def _check(eagle: Eagle3Config, target: ModelConfig) -> None:
    """That the two fit together. Raises ModelConfigError."""
    check_vocabulary(eagle, target)
    of_target = "that of the model it drafts for"
    if eagle.target_hidden_size != target.hidden_size:
        raise ModelConfigError(
            f"it is made for a model with a hidden_size of {eagle.target_hidden_size}, {of_target} is "
            f"{target.hidden_size}"
        )
    if eagle.draft_vocab_size > eagle.vocab_size:
        raise ModelConfigError(f"its draft_vocab_size {eagle.draft_vocab_size} is above vocab_size {eagle.vocab_size}")
    for part, is_there in (("embed_tokens", eagle.has_embedding), ("lm_head", eagle.has_head)):
        if not is_there and eagle.hidden_size != target.hidden_size:
            raise ModelConfigError(
                f"it has no {part}, and its hidden_size is {eagle.hidden_size}, {of_target} {target.hidden_size}"
            )
    if not eagle.has_head and eagle.draft_vocab_size != eagle.vocab_size:
        raise ModelConfigError(
            f"it has no lm_head, and its draft_vocab_size is {eagle.draft_vocab_size}, the vocab_size of the model it "
            f"drafts for {target.vocab_size}"
        )


def _token_ids(eagle: Eagle3Config, checkpoint: Checkpoint | None) -> Tensor | None:
    """int64 [draft vocabulary]: which token of the model each is; None: they are the same. Checkpoints hold the
    differences. Raises WeightsError."""
    own, is_whole = torch.arange(eagle.draft_vocab_size), eagle.draft_vocab_size == eagle.vocab_size
    if checkpoint is None:
        return None if is_whole else own
    if MAP not in checkpoint.names():
        if is_whole:
            return None
        raise WeightsError(
            f"tensor {MAP} is missing: draft_vocab_size is {eagle.draft_vocab_size}, vocab_size {eagle.vocab_size}"
        )
    stored = checkpoint.tensor(MAP, packed=True).read()
    if stored.is_floating_point() or stored.shape != own.shape:
        raise WeightsError(
            f"tensor {MAP} is {stored.dtype} of shape {tuple(stored.shape)}; whole numbers of shape {tuple(own.shape)} "
            "are needed"
        )
    token_ids = own + stored.long()
    if token_ids.min() < 0 or token_ids.max() >= eagle.vocab_size:
        raise WeightsError(f"tensor {MAP} names token {token_ids.min()} to {token_ids.max()} of {eagle.vocab_size}")
    if len(token_ids.unique()) != len(token_ids):
        raise WeightsError(f"tensor {MAP} names a token of the model twice")
    return token_ids
