"""The tokenizer files that a worker hands to routers."""

import logging
from collections.abc import Callable

from common.chat_template import read_chat_template, with_chat_template
from worker.config import WorkerSettings
from worker.loader.load_config import load_model_config
from worker.loader.source import resolve_model
from worker.loader.tokenizer import TokenizerFiles, load_tokenizer_files
from worker.loader.tokenizer_files import check_tokenizer_files

logger = logging.getLogger(__name__)


def tokenizer_loader(settings: WorkerSettings) -> Callable[[], TokenizerFiles]:
    """Reads the template at once: a bad one is refused before the model is loaded. Raises InvalidArgumentError."""
    if settings.chat_template is None:
        return lambda: read_tokenizer_files(settings.model)
    # Costs a second, and most workers are told no template.
    from transformers.utils.chat_template_utils import render_jinja_template

    template = read_chat_template(settings.chat_template, lambda text: render_jinja_template([], chat_template=text))
    return lambda: TokenizerFiles(with_chat_template(read_tokenizer_files(settings.model).files, template))


def read_tokenizer_files(model: str) -> TokenizerFiles:
    """The model's configuration first: what is wrong with it is said before anything slow begins. Raises ModelError."""
    source = resolve_model(model)
    config = load_model_config(source)
    tokenizer = load_tokenizer_files(source)
    remark = check_tokenizer_files(tokenizer.files, config.vocab_size)
    if remark is not None:
        logger.warning("%s", remark)
    return tokenizer
