"""What can be wrong with JSON, as text and as protobuf's Struct."""

import json
import math

from google.protobuf.struct_pb2 import ListValue, Struct, Value

from router.asking.checks import Fault, Limits


def json_object(value: str, limits: Limits) -> str | None:
    """JSON text of an object; empty text counts as one."""
    return _json_fault(value or "{}", (dict,), "a JSON object")


def json_schema(value: str, limits: Limits) -> str | None:
    return _json_fault(value, (dict, bool), "a JSON object or boolean")


def _json_fault(text: str, kinds: tuple[type, ...], words: str) -> str | None:
    try:
        value = json.loads(text, parse_constant=_no_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return f"must be {words}; it has half a surrogate pair"
    except RecursionError:
        return f"must be {words}; it is nested too deeply"
    except ValueError as error:
        return f"must be {words}: {error}"
    return None if isinstance(value, kinds) else f"must be {words}, is {_JSON_NAMES[type(value)]}"


_JSON_NAMES: dict[type, str] = {
    dict: "an object", list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean",
    type(None): "null",
}  # fmt: skip


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def finite_numbers(value: Struct, limits: Limits) -> Fault | None:
    """Templates compute with them, and JSON has no other."""
    return next((f for key, item in value.fields.items() if (f := _no_finite(item, f".{key}"))), None)


def _no_finite(value: Value, at: str) -> Fault | None:
    match value.WhichOneof("kind"):
        case "number_value" if not math.isfinite(value.number_value):
            return Fault(f"must be finite, is {value.number_value:g}", at)
        case "struct_value":
            items = [(f"{at}.{key}", item) for key, item in value.struct_value.fields.items()]
        case "list_value":
            inner: ListValue = value.list_value
            items = [(f"{at}[{i}]", item) for i, item in enumerate(inner.values)]
        case _:
            return None
    return next((fault for path, item in items if (fault := _no_finite(item, path))), None)
