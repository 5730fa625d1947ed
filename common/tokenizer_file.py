"""tokenizer.json, which comes with a model and may be anything."""

from tokenizers import Tokenizer

MAX_TOKENS = 2**24
"""Tables by token id are as long as the largest id."""


def read_tokenizer(content: bytes) -> tuple[Tokenizer, dict[str, int]]:
    """With its vocabulary, of which the library makes a new dictionary each time. Raises ValueError saying what is
    wrong. Takes up to a second for a large vocabulary."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # The library panics at some files, and its panic is no Exception: nobody above would catch it.
        raise ValueError(f"tokenizer.json cannot be read: {error}") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=0)
    if largest >= MAX_TOKENS:
        text = next(text for text, i in vocabulary.items() if i == largest)
        raise ValueError(f"tokenizer.json: token {text!r} has the id {largest}; {MAX_TOKENS - 1} is the most")
    return tokenizer, vocabulary
