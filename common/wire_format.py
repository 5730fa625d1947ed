"""Reads protobuf's wire format field by field, for what protobuf itself refuses to parse."""

from collections.abc import Iterator

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10


def length_delimited_fields(raw: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(field number, contents) of each string, bytes or message, as far as `raw` can be read."""
    position = 0
    while position < len(raw):
        tag, position = varint(raw, position)
        wire_type = tag & 7
        size = _WIDTHS.get(wire_type, 0)
        if wire_type in (_VARINT, _LENGTH_DELIMITED):
            size, position = varint(raw, position)
        if wire_type == _VARINT:
            continue
        if position + size > len(raw):
            return
        if wire_type == _LENGTH_DELIMITED:
            yield tag >> 3, raw[position : position + size]
        position += size


def varint(raw: bytes | memoryview, position: int) -> tuple[int, int]:
    """Its value, and where it ends; the end of `raw` if it does not end."""
    value = 0
    for i, byte in enumerate(raw[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, position + i + 1
    return value, len(raw)
