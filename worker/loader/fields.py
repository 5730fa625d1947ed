"""Fields of a model's files, checked as they are read: whoever made the files may have been wrong."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from worker.loader.errors import ModelConfigError

MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 1e30
SHOWN_CHARACTERS = 80
"""Of a value in a message."""
MAX_LISTED = 10
"""Fields in a message."""


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in `path`; {} when the file is `optional` and absent. Raises ModelConfigError."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} holds no JSON object")
    return value


class Fields:
    """One object of JSON, or the metadata of a GGUF file. A field that is null counts as absent.

    Each reader raises ModelConfigError naming file, field and value; one without `default` needs the field to be
    there. What nobody has read can be refused in the end.
    """

    def __init__(self, values: Mapping[str, Any], file: str, path: str = "") -> None:
        """`path` stands before the names in messages, where the object is inside another one."""
        self.file = file
        self._values = {key: value for key, value in values.items() if value is not None}
        self._mentioned = frozenset(values)
        self._path = path
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def mentions(self, key: str) -> bool:
        """Whether the field is there, be it null."""
        return key in self._mentioned

    def is_one_of(self, key: str, *values: Any) -> bool:
        """Whether it is absent or has one of these values."""
        return key not in self or self._values[key] in values

    def names(self) -> list[str]:
        return list(self._values)

    def place(self, key: str) -> str:
        """Where the field is, for messages."""
        return f"{self.file}: {self._path}{key}"

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_INTEGER) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0, or_zero: bool = False) -> float:
        value = self._get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Written so that NaN is refused.
        if not is_number or not (above < value <= MAX_NUMBER or (or_zero and value == 0)):
            raise self.error(key, f"a number above {above:g}" + (", or 0," if or_zero else ""))
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None, *, one_of: Iterable[str] = ()) -> str:
        value = self._get(key, default)
        choices = tuple(one_of)
        if not isinstance(value, str) or (choices and value not in choices):
            raise self.error(key, f"one of {', '.join(choices)}" if choices else "a text")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        value = self._get(key, default)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(key, "a list of texts")
        return value

    def integers(self, key: str, default: list[int] | None = None) -> list[int]:
        value = self._get(key, default)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(key, "a list of whole numbers")
        return value

    def numbers(self, key: str) -> list[float]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(item) in (int, float) for item in value):
            raise self.error(key, "a list of numbers")
        return value

    def token_ids(self, key: str) -> list[int]:
        """One id or a list of them; none where the field is absent."""
        value = self._get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i <= MAX_INTEGER for i in ids):
            raise self.error(key, "a token id, or a list of them,")
        return ids

    def section(self, key: str) -> "Fields":
        """The object inside; an empty one where the field is absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Fields(value, self.file, f"{self._path}{key}.")

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """The same, unread, where these stand for fields that are absent."""
        return Fields({**defaults, **self._values}, self.file, self._path)

    def expect(self, key: str, *wanted: Any) -> None:
        """Only these values are implemented; an absent field is as good."""
        self._read.add(key)
        if not self.is_one_of(key, *wanted):
            named = " or ".join(map(repr, wanted)) or "null"
            raise ModelConfigError(f"{self.place(key)} is {self._shown(key)}; nothing but {named} is supported")

    def ignore(self, *keys: str) -> None:
        """Another field says that these do not count."""
        self._read.update(keys)

    def refuse_unread(self, harmless: Iterable[str], prefix: str = "") -> None:
        """Raise for fields whose names begin with `prefix`, unless they were read or are `harmless`."""
        unread = sorted(self._values.keys() - self._read - set(harmless))
        unknown = [f"{self._path}{key} is {self._shown(key)}" for key in unread if key.startswith(prefix)]
        if unknown:
            more = f" (and {len(unknown) - MAX_LISTED} more)" if len(unknown) > MAX_LISTED else ""
            raise ModelConfigError(
                f"{self.file}: {'; '.join(unknown[:MAX_LISTED])}{more}; fields that are not known here may change what "
                "the model computes. Remove those that do not"
            )

    def error(self, key: str, wanted: str) -> ModelConfigError:
        return ModelConfigError(f"{self.place(key)} is {self._shown(key)}; {wanted} is needed")

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise ModelConfigError(f"{self.file} lacks {self._path}{key}")
        return value

    def _shown(self, key: str) -> str:
        text = repr(self._values[key]) if key in self else "absent"
        return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
