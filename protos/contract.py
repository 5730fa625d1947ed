"""The wire contract as one line an element, and the check that nothing released was changed or taken away.

    python protos/contract.py            compare with released.txt; exit 1 and name what broke
    python protos/contract.py --release  write released.txt, when a version is released

Fields are only added, so every line of the last release must still be there. A line holds what the wire and generated
code depend on: names, numbers, types, cardinality, presence, oneof.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, ServiceDescriptor

from fissile.v1 import generation_pb2, sampling_pb2, sequence_pb2, worker_pb2

RELEASED = Path(__file__).resolve().parent / "released.txt"
FILES = (generation_pb2, sampling_pb2, sequence_pb2, worker_pb2)


def listing() -> list[str]:
    """Every element of the contract, sorted."""
    lines: list[str] = []
    for file in FILES:
        for message in file.DESCRIPTOR.message_types_by_name.values():
            lines += message_lines(message)
        for enum in file.DESCRIPTOR.enum_types_by_name.values():
            lines += enum_lines(enum)
        for service in file.DESCRIPTOR.services_by_name.values():
            lines += service_lines(service)
    return sorted(lines)


def message_lines(message: Descriptor) -> Iterator[str]:
    yield f"message {message.full_name}"
    for field in message.fields:
        yield f"field {field.full_name} = {field.number} {field_type(field)}"
    for nested in message.nested_types:
        yield from message_lines(nested)


def field_type(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    name = (
        kind.full_name
        if kind
        else next(k for k, v in vars(FieldDescriptor).items() if k.startswith("TYPE_") and v == field.type)
    )
    words = ["repeated"] if field.is_repeated else ["optional"] if field.has_presence else []
    oneof = field.containing_oneof
    suffix = [f"in {oneof.name}"] if oneof and not oneof.name.startswith("_") else []
    return " ".join([*words, name, *suffix])


def enum_lines(enum: EnumDescriptor) -> Iterator[str]:
    for value in enum.values:
        yield f"enum {enum.full_name}.{value.name} = {value.number}"


def service_lines(service: ServiceDescriptor) -> Iterator[str]:
    for method in service.methods:
        up = "stream " if method.client_streaming else ""
        down = "stream " if method.server_streaming else ""
        types = f"({up}{method.input_type.full_name}) returns ({down}{method.output_type.full_name})"
        yield f"rpc {service.full_name}.{method.name}{types}"


def broken() -> list[str]:
    """Lines of the release that are no longer true."""
    return sorted(set(RELEASED.read_text().splitlines()) - set(listing()))


if __name__ == "__main__":
    if sys.argv[1:] == ["--release"]:
        RELEASED.write_text("\n".join(listing()) + "\n")
        raise SystemExit(0)
    for line in broken():
        print(f"changed or gone since the last release: {line}")
    raise SystemExit(1 if broken() else 0)
