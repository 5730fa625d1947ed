"""The prompts of a GenerateRequest, as tokens."""

import asyncio
from collections.abc import Sequence

from fissile.errors import FailedPreconditionError
from fissile.v1 import GenerateRequest
from fissile.v1 import Prompt as PromptMessage
from router.asking.checks import Limits
from router.asking.spec import Prompt
from router.asking.validation import check_length
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
        check_vocabulary(token_ids, tokenizer, limits)
    else:
        field, token_ids = f"{at}tokens.token_ids", list(message.tokens.token_ids)
    check_length(field, len(token_ids), limits)
    return Prompt(field, token_ids)


def check_vocabulary(token_ids: Sequence[int], tokenizer: Tokenizer, limits: Limits) -> None:
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
