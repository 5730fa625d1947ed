"""Which tokens end a sequence. Ids in a model's files are not always ids of the model."""

from collections.abc import Iterable

from worker.loader.fields import Fields


def ending_tokens(fields: Iterable[tuple[Fields, str]], vocab_size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(the ids in these fields, each once; remarks about those that are left out).

    An id beyond the vocabulary can never be sampled, so leaving it out changes nothing; kept, it would be an index out
    of bounds wherever logits are masked. Raises ModelConfigError for what is no id at all.
    """
    ids: list[int] = []
    remarks: list[str] = []
    for source, key in fields:
        found = source.token_ids(key)
        beyond = [i for i in found if i >= vocab_size]
        ids += [i for i in found if i < vocab_size]
        if beyond:
            listed = ", ".join(map(str, beyond))
            remarks.append(f"{source.place(key)} names {listed}, beyond the vocabulary of {vocab_size}: left out")
    return tuple(dict.fromkeys(ids)), tuple(remarks)
