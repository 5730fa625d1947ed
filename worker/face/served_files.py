"""What a worker reads of its model's files beside the ranks: the tokenizer, which it hands to routers, and the model's
fingerprint."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from common.chat_template import read_chat_template, with_chat_template
from worker.config import WorkerSettings
from worker.loader.fingerprint import model_fingerprint
from worker.loader.source import resolve_model
from worker.loader.tokenizer import TokenizerFiles, load_tokenizer_files
from worker.loader.tokenizer_files import check_tokenizer_files
from worker.start_checks import load_fitting_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedFiles:
    tokenizer: TokenizerFiles
    model_fingerprint: str


def files_reader(settings: WorkerSettings) -> Callable[[], ServedFiles]:
    """Reads the template at once: a bad one is refused before the model is loaded. Raises InvalidArgumentError."""
    if settings.chat_template is None:
        return lambda: read_served_files(settings)
    template = read_chat_template(settings.chat_template)
    return lambda: read_served_files(settings, template)


def read_served_files(settings: WorkerSettings, chat_template: str | None = None) -> ServedFiles:
    """The model's configuration first: what is wrong with it is said before anything slow begins. Raises ModelError."""
    source = resolve_model(settings.model)
    config = load_fitting_config(source, settings)
    tokenizer = load_tokenizer_files(source)
    remark = check_tokenizer_files(tokenizer.files, config.vocab_size)
    if remark is not None:
        logger.warning("%s", remark)
    if chat_template is not None:
        tokenizer = TokenizerFiles(with_chat_template(tokenizer.files, chat_template))
    return ServedFiles(tokenizer, model_fingerprint(source, is_dummy=settings.load_format == "dummy"))
