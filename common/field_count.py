"""How many fields a message has, before anything is made of it: an empty entry of a list takes two bytes on its way and
up to two hundred here, and protobuf lets nothing else run while it makes millions of them."""

import asyncio
from collections.abc import Iterator, Mapping
from functools import cache

from google.protobuf.descriptor import Descriptor

from common.wire_format import varint
from fissile.errors import InvalidArgumentError

MAX_FIELDS = 131_072
"""Of a message, those inside of others counted: to parse so many takes some ten milliseconds and 30 MB."""
FEW_BYTES = 2 * MAX_FIELDS
"""So many have no more fields than that: none takes less than two bytes."""
SLICE = 1024
"""Fields that are counted at a stretch: about half a millisecond, half of what a turn of a router's loop may take."""

_VARINT, _LENGTH_DELIMITED = 0, 2
_WIDTHS = {1: 8, 3: 0, 4: 0, 5: 4}
"""Bytes behind a tag, where its wire type says it. 3 and 4 stand around a group, whose fields follow."""


async def check_num_fields(raw: bytes, descriptor: Descriptor) -> None:
    """Raises InvalidArgumentError, with the field that was one too many. The event loop goes on meanwhile."""
    for num_fields, number in enumerate(_outermost(raw, descriptor), 1):
        if num_fields > MAX_FIELDS:
            field = descriptor.fields_by_number.get(number)
            name = field.name if field else f"field {number}"
            raise InvalidArgumentError.of(name, f"with it the request has more than {MAX_FIELDS} fields and entries")
        if num_fields % SLICE == 0:
            await asyncio.sleep(0)


def _outermost(raw: bytes, descriptor: Descriptor) -> Iterator[int]:
    """For each field, however deep inside of others, the number of the outermost one that it is in. Ends where `raw` is
    no message: protobuf goes no further, either."""
    position, end, inner, tag = 0, len(raw), _inner(descriptor), 0
    outer: list[tuple[int, Mapping[int, Descriptor]]] = []
    """Where the messages around this one end, and what may be in them."""
    outermost = 0
    try:
        while True:
            while position == end and outer:
                end, inner = outer.pop()
            if position >= end:
                return
            tag, position = raw[position], position + 1
            if tag > 127:
                tag, position = varint(raw, position - 1)
            if not outer:
                outermost = tag >> 3
            yield outermost
            if tag & 7 == _LENGTH_DELIMITED:
                size, position = raw[position], position + 1
                if size > 127:
                    size, position = varint(raw, position - 1)
                if tag in inner:
                    outer.append((end, inner))
                    end, inner = position + size, _inner(inner[tag])
                else:
                    position += size
            elif tag & 7 == _VARINT:
                position = position + 1 if raw[position] < 128 else varint(raw, position)[1]
            else:
                position += _WIDTHS[tag & 7]
    except LookupError:
        return


@cache
def _inner(descriptor: Descriptor) -> Mapping[int, Descriptor]:
    """Of its fields that are messages, by tag."""
    return {
        field.number << 3 | _LENGTH_DELIMITED: field.message_type for field in descriptor.fields if field.message_type
    }
