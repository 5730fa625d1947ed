"""SentencePiece's BPE, as GGUF files have it: tokens with scores, and no merges.

llama.cpp joins, at each turn, the two neighbours whose text together is the token of the highest score. In terms of
BPE: each token that two others make is a merge, and better tokens come first.
"""

from typing import TYPE_CHECKING

from worker.loader.errors import ModelConfigError
from worker.loader.fields import Fields

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"


def sentence_piece(fields: Fields, prefix: str, tokens: list[str]) -> "Tokenizer":
    """`prefix`: of the fields' names. Raises ModelConfigError."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = fields.token_ids(f"{prefix}unknown_token_id")
    adds_space = fields.flag(f"{prefix}add_space_prefix", True)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges(vocabulary, _scores(fields, f"{prefix}scores", len(tokens))),
        unk_token=tokens[unknown[0]] if unknown and unknown[0] < len(tokens) else None,
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    # Before each piece of text between special tokens, as llama.cpp does it.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if adds_space else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _scores(fields: Fields, key: str, count: int) -> list[float]:
    scores = fields.numbers(key)
    if len(scores) != count:
        raise ModelConfigError(f"{fields.file}: {key} has {len(scores)} scores for {count} tokens")
    return scores


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, those of the best tokens first."""
    found = [
        (-scores[i], i, token[:at], token[at:])
        for token, i in vocabulary.items()
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    found.sort()
    return [(left, right) for _, _, left, right in found]
