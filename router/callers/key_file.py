"""The file of API keys: TOML, a `[[keys]]` for each. docs/operations.md has the format."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from common.authentication import digest_of
from common.config import is_sendable
from fissile.errors import InvalidArgumentError
from router.callers.caller import Caller, Quota

MIN_SECRET_LENGTH = 16
"""What is shorter can be guessed from its digest."""

_Limit = Annotated[int | None, Field(ge=1)]


class _Key(BaseModel):
    """Fields as in the file; those of Quota have its names."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    name: str = Field(min_length=1, max_length=64)
    secret: SecretStr | None = None
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    tenant: str | None = Field(None, max_length=128)
    max_open_requests: _Limit = None
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    min_priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    models: list[str] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _check(self) -> "_Key":
        if (self.secret is None) == (self.sha256 is None):
            raise ValueError("exactly one of secret and sha256 is needed")
        if self.secret is not None:
            secret = self.secret.get_secret_value()
            if len(secret) < MIN_SECRET_LENGTH or not is_sendable(secret):
                raise ValueError(f"secret: must be at least {MIN_SECRET_LENGTH} printable ASCII characters, no blanks")
        if not self.name.isprintable():
            raise ValueError("name: must be printable")
        return self

    def digest(self) -> bytes:
        if self.secret is None:
            return bytes.fromhex(self.sha256 or "")
        return digest_of(self.secret.get_secret_value())

    def caller(self) -> Caller:
        quota = Quota(
            max_open_requests=self.max_open_requests,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            min_priority=self.min_priority,
            models=None if self.models is None else frozenset(self.models),
        )
        return Caller(self.name, self.name if self.tenant is None else self.tenant, quota)


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    keys: list[_Key] = Field(min_length=1)


def parse_keys(text: bytes) -> dict[bytes, Caller]:
    """Who each key is, by its SHA-256. Raises InvalidArgumentError, naming the place but no value."""
    try:
        keys = _KeyFile.model_validate(tomllib.loads(text.decode())).keys
    except ValidationError as error:
        raise InvalidArgumentError("; ".join(_described(fault) for fault in error.errors())) from None
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"is no UTF-8 at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgumentError(f"is no TOML: {error}") from None
    except RecursionError:
        raise InvalidArgumentError("nests too deeply") from None
    result: dict[bytes, Caller] = {}
    names: set[str] = set()
    for i, key in enumerate(keys):
        if key.name in names:
            raise InvalidArgumentError(f"keys[{i}].name: is that of a key before it")
        if key.digest() in result:
            raise InvalidArgumentError(f"keys[{i}]: has the secret of a key before it")
        names.add(key.name)
        result[key.digest()] = key.caller()
    return result


def read_keys(path: Path) -> dict[bytes, Caller]:
    """The same of a file; one that cannot be read is refused in the same way, and the file is named."""
    try:
        return parse_keys(path.read_bytes())
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror}") from error
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error.message}") from None


def _described(fault: Any) -> str:
    """Of pydantic's."""
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in fault["loc"])
    return f"{place.removeprefix('.')}: {fault['msg'].removeprefix('Value error, ')}"
