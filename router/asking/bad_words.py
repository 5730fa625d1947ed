"""Texts that must not be generated, as the token sequences that must not be."""

import asyncio
from collections.abc import Sequence

from common.bounds import MAX_BAD_WORD_TOKENS
from fissile.errors import InvalidArgumentError
from fissile.v1 import TokenSequence
from router.model.tokenizer import Tokenizer

_BEFORE = ("(", "\n")
"""What a word may follow without a space: tokenizers of the SentencePiece kind begin every text with one."""


async def bad_token_sequences(words: Sequence[str], tokenizer: Tokenizer) -> list[TokenSequence]:
    """Each word as it is tokenised at the beginning of a text, after a space and right after another character; equal
    sequences once. A word that the model spells in yet another way is not found. Raises InvalidArgumentError for a word
    without tokens or with too many."""
    if not words:
        return []
    found: dict[tuple[int, ...], None] = {}
    variants = [(i, variant) for i, word in enumerate(words) for variant in _variants(word)]
    encoded = await asyncio.gather(*(tokenizer.encode(text, add_special_tokens=False) for _, text in variants))
    for (i, _), token_ids in zip(variants, encoded, strict=True):
        if not 1 <= len(token_ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidArgumentError.of(
                f"options.bad_words[{i}]", f"must have 1 to {MAX_BAD_WORD_TOKENS} tokens, has {len(token_ids)}"
            )
        found[tuple(token_ids)] = None
    inner = await asyncio.gather(*(_after(before, word.lstrip(" "), tokenizer) for word in words for before in _BEFORE))
    found |= dict.fromkeys(token_ids for token_ids in inner if 1 <= len(token_ids) <= MAX_BAD_WORD_TOKENS)
    return [TokenSequence(token_ids=token_ids) for token_ids in found]


def _variants(word: str) -> tuple[str, ...]:
    bare = word.lstrip(" ")
    return (bare, f" {bare}") if bare else (word,)


async def _after(before: str, word: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of `word` in `before` + `word`; none where a token has a part of both."""
    first = await tokenizer.encode(before, add_special_tokens=False)
    both = await tokenizer.encode(before + word, add_special_tokens=False)
    return tuple(both[len(first) :]) if both[: len(first)] == first else ()
