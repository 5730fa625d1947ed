"""Requests from bytes, with an error that a client can act on: gRPC itself answers UNKNOWN to what protobuf refuses."""

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from fissile.errors import FieldViolation, InvalidArgumentError

_LENGTH_DELIMITED = 2


def decode(raw: bytes, parse: Callable[[bytes], Any]) -> Any:
    """A message by its `FromString`. Raises InvalidArgumentError, naming string fields that are not UTF-8."""
    try:
        return parse(raw)
    except DecodeError as error:
        descriptor = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]
        fields = list(_not_utf8(raw, descriptor, ""))
        if not fields:
            raise InvalidArgumentError(f"the request is not a valid {descriptor.full_name}") from error
        violations = [FieldViolation(field, "must be UTF-8") for field in fields]
        text = "; ".join(f"{field}: must be UTF-8" for field in fields)
        raise InvalidArgumentError(text, violations=violations) from error


def _not_utf8(raw: bytes, descriptor: Descriptor, prefix: str) -> Iterator[str]:
    """Paths of the string fields that are not UTF-8. Reads the wire format as fields that nobody knows."""
    try:
        fields: Any = UnknownFieldSet(Empty.FromString(raw))
    except DecodeError:
        return
    for unknown in fields:
        field = descriptor.fields_by_number.get(unknown.field_number)
        if field is None or unknown.wire_type != _LENGTH_DELIMITED:
            continue
        if field.message_type is not None:
            yield from _not_utf8(unknown.data, field.message_type, f"{prefix}{field.name}.")
        elif field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(unknown.data):
            yield prefix + field.name


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
