"""A byte-level tokenizer small enough for exact sets of tokens, and a tiny model that has it."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.runner.conftest import save_llama
from worker.grammars.compiler import GrammarCompiler

EOS, SECOND_EOS = 256, 257
END = {EOS, SECOND_EOS}
WORDS = ("ab", "abc")
VOCAB_SIZE = 300
"""Of the model: some ids more than the tokenizer has."""


@cache
def byte_tokenizer() -> Tokenizer:
    """A token for each byte, with the byte as its id; two ends; "ab" and "abc"."""
    vocabulary = {letter: byte for byte, letter in enumerate(_alphabet())}
    vocabulary |= {"<end>": EOS, "<stop>": SECOND_EOS} | {word: 258 + i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<end>", "<stop>")])
    return tokenizer


def _alphabet() -> list[str]:
    """Byte-level BPE's letter for each byte: printable ones stand for themselves, the others come from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: byte_tokenizer().to_str().encode(), VOCAB_SIZE, (EOS, SECOND_EOS))


def of(*texts: str) -> set[int]:
    """Tokens of these texts: a byte, or a whole word."""
    return {258 + WORDS.index(text) if text in WORDS else text.encode()[0] for text in texts}


def text_of(token_ids: list[int]) -> str:
    """Without what ends it."""
    words = {258 + i: word.encode() for i, word in enumerate(WORDS)}
    return b"".join(words.get(i) or bytes([i]) for i in token_ids if i not in END).decode()


def save_byte_model(path: Path) -> None:
    save_llama(path, vocab_size=VOCAB_SIZE, eos_token_id=[EOS, SECOND_EOS])
    byte_tokenizer().save(str(path / "tokenizer.json"))
