"""GGUF files in several parts, as llama.cpp's `gguf-split` cuts them: the first one has the model's metadata, each its
own tensors, and the names of all of them say how many there are. No torch."""

from pathlib import Path

from worker.loader.errors import WeightsError
from worker.loader.gguf.file import GGUFFile, GGUFTensor, read_gguf
from worker.loader.source import gguf_parts

NUMBER, COUNT, NUM_TENSORS = "split.no", "split.count", "split.tensors.count"
"""Of a part, counted from 0; of parts; of tensors in all of them."""


def read_gguf_parts(path: Path, *, with_texts: bool = True) -> GGUFFile:
    """The model whose first part, or only one, is at `path`: the first one's metadata, the tensors of all of them.
    Raises WeightsError, naming the file that does not fit."""
    paths = gguf_parts(path)
    first = read_gguf(path, with_texts=with_texts)
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(paths):
        file = first if number == 0 else read_gguf(part, with_texts=False)
        _check(part, file, first, number, len(paths))
        if twice := sorted(file.tensors.keys() & tensors.keys()):
            raise WeightsError(f"{part}: tensor {twice[0]} is in another part, too; are they of one model?")
        tensors |= file.tensors
    wanted = first.metadata.get(NUM_TENSORS)
    if len(paths) > 1 and wanted != len(tensors):
        raise WeightsError(f"{path}: {NUM_TENSORS} is {wanted}; its {len(paths)} parts have {len(tensors)} tensors")
    return GGUFFile(first.metadata, tensors)


def _check(path: Path, file: GGUFFile, first: GGUFFile, number: int, count: int) -> None:
    """That a file is the part that its name says, of the model that the first one is of."""

    def error(key: str, wanted: object, why: str) -> WeightsError:
        return WeightsError(f"{path}: {key} is {file.metadata.get(key)}; {wanted}, as {why}")

    if (file.metadata.get(COUNT) or 1) != count:
        raise error(COUNT, count, "the file's name says (model-00001-of-00002.gguf is the first of two parts)")
    if count > 1 and file.metadata.get(NUMBER) != number:
        raise error(NUMBER, number, "the file's name says")
    for key in (NUM_TENSORS, "general.architecture"):
        said = file.metadata.get(key)
        if said != first.metadata.get(key) and (said is not None or key == NUM_TENSORS):
            raise error(key, first.metadata.get(key), "the first part says")
