"""A chat template of the operator's in place of those of a model's tokenizer files. Router and worker both take one."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from jinja2 import TemplateSyntaxError

from common.jinja import compiled
from fissile.errors import InvalidArgumentError

TEMPLATE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates/"
CONFIG = "tokenizer_config.json"


def read_chat_template(path: Path) -> str:
    """The template in a file. Raises InvalidArgumentError naming the file and, of a fault of syntax, the line."""
    try:
        text = path.read_text(encoding="utf-8")
        compiled(text)
    except TemplateSyntaxError as error:
        raise InvalidArgumentError(f"chat-template {path}, line {error.lineno}: {error.message}") from error
    except OSError as error:
        raise InvalidArgumentError(f"chat-template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"chat-template {path}: no UTF-8 at byte {error.start}") from error
    if not text.strip():
        raise InvalidArgumentError(f"chat-template {path}: is empty")
    return text


def with_chat_template(files: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """Tokenizer files with this template, for all requests, and none of the model's own."""
    result = {name: content for name, content in files.items() if not name.startswith(NAMED_TEMPLATES)}
    # A malformed file is left as it is: whoever reads it for its own sake names it.
    with suppress(ValueError, RecursionError):
        config = json.loads(result.get(CONFIG, b"{}"))
        if isinstance(config, dict) and config.pop("chat_template", None) is not None:
            result[CONFIG] = json.dumps(config).encode()
    result[TEMPLATE] = template.encode()
    return result
