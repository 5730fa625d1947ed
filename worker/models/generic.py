"""Any decoder of `transformers` around our attention: `--model-impl transformers`."""

import logging
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from worker.attention.context import current_context
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import Checkpoint, LazyTensor, fill
from worker.loader.config import GenericConfig
from worker.loader.errors import ModelConfigError, WeightsError
from worker.loader.generic_config import summary_of
from worker.models.base import CausalLM
from worker.models.replaced_attention import replace_attention

logger = logging.getLogger(__name__)

LIBRARY = f"transformers {transformers.__version__}"
MAX_LISTED = 5
"""Tensors in a message."""


class GenericForCausalLM(CausalLM):
    """`CausalLM` has the contract; the positions of tokens come with the forward context."""

    def __init__(self, vocab_size: int, body: nn.Module, head: PreTrainedModel) -> None:
        """`head` is the model with a `_GivenBody` in place of its `body`."""
        super().__init__()
        self.vocab_size = vocab_size
        self.body, self._head = body, head

    def forward(self, input_ids: Tensor) -> Tensor:
        context = current_context()
        assert context.positions is not None
        output = self.body(input_ids=input_ids[None], position_ids=context.positions[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden if context.wanted is None else hidden.index_select(0, context.wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits[:, : self.vocab_size]


class _GivenBody(nn.Module):
    """Hands through the hidden states that it is given, so that the model does to them what it does to its own."""

    def __init__(self, output: type[Any]) -> None:
        """`output`: the type of what the body returns."""
        super().__init__()
        self._output = output

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self._output(last_hidden_state=inputs_embeds)


def load_generic(
    config: GenericConfig, setup: LayerSetup, checkpoint: Checkpoint | None, seed: int
) -> GenericForCausalLM:
    """With weights: those of the checkpoint, or random ones. Raises ModelConfigError or WeightsError."""
    if setup.tp.size > 1 or setup.ep.size > 1:
        raise ModelConfigError("model_impl transformers needs tensor_parallel_size 1, and no expert_parallel")
    if setup.quantization != "none":
        raise ModelConfigError(f"model_impl transformers needs quantization none; it is {setup.quantization}")
    try:
        # Not in inference mode: transformers' threads, which fill the parameters, are not, either.
        with torch.inference_mode(False), torch.no_grad():
            model: Any = _loaded(config, setup, checkpoint, seed).eval()
            model.to(setup.device)
        generic = _split(config, setup, model)
    except WeightsError:
        raise
    except Exception as error:  # models are many, and raise what they like
        logger.debug("transformers failed", exc_info=True)
        raise ModelConfigError(f"{config.architecture} cannot be run through {LIBRARY}: {summary_of(error)}") from error
    logger.warning("%s runs through %s: slower than a model of fissile's own", config.architecture, LIBRARY)
    return generic


def _loaded(config: GenericConfig, setup: LayerSetup, checkpoint: Checkpoint | None, seed: int) -> PreTrainedModel:
    """Our reader, and the library's ideas of what tensors are called and how they are put together."""
    disable_progress_bar()
    own = AutoConfig.from_pretrained(config.path, trust_remote_code=False, local_files_only=True)
    options = {"attn_implementation": "eager", "dtype": setup.dtype, "trust_remote_code": False}
    if checkpoint is None:
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(own, **options)
        return model
    state: dict[str, Tensor] = {}
    fill({name: partial(_keep, state, name) for name in checkpoint.names()}, checkpoint)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(own)]
    model, report = kind.from_pretrained(None, config=own, state_dict=state, output_loading_info=True, **options)
    wrong = [
        f"{len(report[which])} {which.removesuffix('_keys')}: {', '.join(sorted(map(str, report[which]))[:MAX_LISTED])}"
        for which in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if report[which]
    ]
    if wrong:
        raise WeightsError(f"the checkpoint does not fit the model; tensors {'; '.join(wrong)}")
    return model


def _keep(state: dict[str, Tensor], name: str, tensor: LazyTensor) -> None:
    with torch.inference_mode(False):  # of the threads that read; parameters cannot be made of such tensors
        state[name] = tensor.read()


def _split(config: GenericConfig, setup: LayerSetup, model: PreTrainedModel) -> GenericForCausalLM:
    """Into body, with our attention, and head."""
    body = model.base_model
    if body is model:
        raise ModelConfigError("it has no body apart from its head")
    token = torch.zeros(1, 1, dtype=torch.int64, device=setup.device)
    wanted = model(input_ids=token, position_ids=token, use_cache=False).logits[0]
    output = body(input_ids=token, position_ids=token, use_cache=False)
    replace_attention(model, body, setup, config.num_layers, config.max_model_len)
    setattr(model, model.base_model_prefix, _GivenBody(type(output)))
    generic = GenericForCausalLM(config.vocab_size, body, model)
    found = generic.logits(output.last_hidden_state[0])
    if found.shape[1] != config.vocab_size or not torch.allclose(found, wanted[:, : config.vocab_size], rtol=1e-2):
        raise ModelConfigError("its head is not a function of the last hidden states alone")
    return generic
