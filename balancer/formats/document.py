"""JSON documents, read strictly: a repeated key, a NaN or a too deep nesting is an error."""

import json
from collections.abc import Mapping
from pathlib import Path

from equipoise.balancer.formats.files import read_text
from equipoise.balancer.formats.numbers import short
from equipoise.hal.errors import FormatError


def decode_json(path: Path, data: bytes) -> dict[str, object]:
    """The object that the file holds. Raises `FormatError` that names line and column."""
    text = read_text(path, data)
    try:
        loaded: object = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise FormatError(str(path), f"is not JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise FormatError(str(path), "is not read: nested too deep") from None
    except ValueError as error:
        raise FormatError(str(path), f"is not JSON: {str(error)[:100]}") from None
    if not isinstance(loaded, dict):
        raise FormatError(str(path), f"holds {short(loaded)}, not an object")
    return loaded


def encode_json(fields: Mapping[str, object]) -> bytes:
    """One key a line, and of a list of rows one row a line."""
    lines = [f"  {json.dumps(key)}: {_value(value)}" for key, value in fields.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _value(value: object) -> str:
    if not isinstance(value, list) or not value or not isinstance(value[0], list | dict):
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(json.dumps(row) for row in value) + "\n  ]"


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The parser itself would silently keep the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {short(twice)} is given twice")
    return found


def _constant(name: str) -> object:
    raise ValueError(f"{name} is not a number of JSON")
