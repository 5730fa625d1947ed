"""Requests from bytes, with an error that a client can act on: gRPC itself answers UNKNOWN to what protobuf refuses."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from common.field_count import FEW_BYTES, check_num_fields
from common.wire_format import length_delimited_fields
from fissile.errors import MAX_VIOLATIONS, FieldViolation, InvalidArgumentError

MAX_DEPTH = 100
"""Messages inside of each other that protobuf parses."""
MAX_SEARCHED = 8192
"""Fields that are looked at for what is wrong: some ten milliseconds."""


async def decode(raw: bytes, parse: Callable[[bytes], Any]) -> Any:
    """A message by its `FromString`. Raises InvalidArgumentError, naming string fields that are not UTF-8, the field
    that nests too deeply, and the one that was too many."""
    descriptor = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]
    if len(raw) > FEW_BYTES:
        await check_num_fields(raw, descriptor)
    try:
        return parse(raw)
    except DecodeError as error:
        violations = list(islice(_faults(raw, descriptor), MAX_VIOLATIONS))
        if not violations:
            raise InvalidArgumentError(f"the request is not a valid {descriptor.full_name}") from error
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        raise InvalidArgumentError(text, violations=violations) from error


def _faults(raw: bytes, descriptor: Descriptor) -> Iterator[FieldViolation]:
    path = [(length_delimited_fields(memoryview(raw)), descriptor, "")]
    num_fields = 0
    while path and num_fields < MAX_SEARCHED:
        fields, descriptor, prefix = path[-1]
        number, data = next(fields, (0, memoryview(b"")))
        if number == 0:
            path.pop()
            continue
        num_fields += 1
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        name = prefix + field.name
        if field.message_type is not None:
            if len(path) > MAX_DEPTH:
                yield FieldViolation(name.partition(".")[0], f"must not nest deeper than {MAX_DEPTH} messages")
                return
            path.append((length_delimited_fields(data), field.message_type, f"{name}."))
        elif field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(data):
            yield FieldViolation(name, "must be UTF-8")


def _is_utf8(data: memoryview) -> bool:
    try:
        str(data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True
