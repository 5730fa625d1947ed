"""The prompts of a request, as tokens."""

import asyncio
from collections.abc import Sequence

from fissile.errors import FailedPreconditionError, InvalidArgumentError
from fissile.v1 import ChatRequest, GenerateRequest
from fissile.v1 import Prompt as PromptMessage
from router.asking.answer_grammar import answer_grammar
from router.asking.chat import render_chat
from router.asking.checks import Limits
from router.asking.spec import Prompt
from router.asking.validation import check_length
from router.config import RouterSettings
from router.model.chat_template import ChatTemplate
from router.model.tokenizer import Tokenizer


async def read_prompts(request: GenerateRequest, tokenizer: Tokenizer, limits: Limits) -> list[Prompt]:
    """One, or as many as `prompts` has. Raises InvalidArgumentError for one that leaves no room for a token."""
    special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    if not request.prompts:
        return [await _read(request, "", special, tokenizer, limits)]
    return await asyncio.gather(
        *(_read(prompt, f"prompts[{i}].", special, tokenizer, limits) for i, prompt in enumerate(request.prompts))
    )


async def _read(
    message: GenerateRequest | PromptMessage, at: str, special: bool, tokenizer: Tokenizer, limits: Limits
) -> Prompt:
    if message.WhichOneof("prompt") == "text":
        field, token_ids = f"{at}text", await tokenizer.encode(message.text, add_special_tokens=special)
        _check_vocabulary(token_ids, tokenizer, limits)
    else:
        field, token_ids = f"{at}tokens.token_ids", list(message.tokens.token_ids)
    check_length(field, len(token_ids), limits)
    return Prompt(field, token_ids)


async def read_chat(request: ChatRequest, tokenizer: Tokenizer, limits: Limits, settings: RouterSettings) -> Prompt:
    """The one prompt of a conversation, through the chat template. Raises as `render_chat` and `answer_grammar` do, and
    InvalidArgumentError for one that leaves no room for a token."""
    if request.chat_template and not settings.allow_chat_template:
        raise InvalidArgumentError.of("chat_template", "this router does not allow one (allow-chat-template)")
    if tokenizer.template is None and not request.chat_template:
        raise FailedPreconditionError.of(
            "model", "has no chat template, so it takes prompts alone; the operator can give it one (chat-template)"
        )
    template = tokenizer.template or ChatTemplate(request.chat_template)
    chat = await tokenizer.in_thread(render_chat, template, request, settings.chat_format)
    token_ids = await tokenizer.encode(chat.text, add_special_tokens=False)
    check_length("messages", len(token_ids), limits)
    _check_vocabulary(token_ids, tokenizer, limits)
    grammar = answer_grammar(request, chat.reading, tokenizer.added_token_id)
    return Prompt("messages", token_ids, chat.reading, grammar)


def _check_vocabulary(token_ids: Sequence[int], tokenizer: Tokenizer, limits: Limits) -> None:
    """Of text that was tokenised. Raises FailedPreconditionError: that a tokenizer has more tokens than the model is no
    fault of who wrote the text."""
    largest = max(token_ids, default=0)
    if largest >= limits.vocab_size:
        token = tokenizer.decode([largest], skip_special_tokens=False)
        raise FailedPreconditionError.of(
            "model",
            f"its tokenizer does not fit it: the text has the token {token!r} ({largest}), and the model's vocabulary "
            f"has {limits.vocab_size}",
        )
