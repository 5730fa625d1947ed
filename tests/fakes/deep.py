"""Values that nest as deeply as is asked for, and what they are made of on the wire."""

from collections.abc import Callable

from fissile.v1 import ChatRequest


def delimited(number: int, data: bytes) -> bytes:
    """A field of a message, a text or bytes, as on the wire."""
    size, rest = b"", len(data)
    while rest > 127:
        size, rest = size + bytes([rest & 127 | 128]), rest >> 7
    return bytes([number << 3 | 2]) + size + bytes([rest]) + data


def nested_arguments(num: int) -> bytes:
    """Bytes of a ChatRequest with template arguments that are `num` Structs inside of each other."""
    data = b""
    for _ in range(num):
        value = delimited(5, data)  # Value.struct_value
        data = delimited(1, delimited(1, b"a") + delimited(2, value))  # an entry of Struct.fields
    return delimited(ChatRequest.DESCRIPTOR.fields_by_name["template_arguments"].number, data)


def schema_chain(num: int, link: Callable[[dict[str, str]], object]) -> dict[str, object]:
    """`num` definitions, each made by `link` from a reference to the next."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(num)}
    return {"$defs": {**definitions, f"d{num}": {"type": "string"}}, "$ref": "#/$defs/d0"}
