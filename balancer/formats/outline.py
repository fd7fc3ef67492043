"""The YAML that configurations are written in, read strictly: mappings, lists, plain scalars.

Anchors are refused: they are how a small file becomes a vast one. So are repeated keys, which the
loader would drop silently. Only decimal whole numbers are numbers.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from equipoise.balancer.formats.files import read_text
from equipoise.balancer.formats.numbers import short
from equipoise.hal.errors import FormatError

LARGEST = 64 << 20
"""Bytes at most: a thousand layers of ten thousand slots."""
DEEPEST = 8
# The one in C is ten times faster, where PyYAML was built with it.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
WHOLE = re.compile(r"[-+]?[0-9]{1,18}")


def decode_yaml(path: Path, data: bytes) -> dict[str, object]:
    """The mapping that the file holds; keys as they are spelt. Raises `FormatError`."""
    if len(data) > LARGEST:
        raise FormatError(str(path), f"is larger than {LARGEST} bytes")
    text = read_text(path, data)
    try:
        _check_events(path, text)
        node = yaml.compose(text, Loader=LOADER)
    except yaml.YAMLError as error:
        raise FormatError(str(path), f"is not YAML: {_problem(error)}") from None
    loaded = _value(path, node)
    if not isinstance(loaded, dict):
        raise FormatError(str(path), f"holds {short(loaded)}, not a mapping")
    return loaded


def encode_yaml(fields: Mapping[str, object]) -> bytes:
    """Keys sorted, lists on one line each however long, as the engines' own tools write them."""
    text = ""
    for key, value in sorted(fields.items()):
        if isinstance(value, Mapping):
            rows = "".join(f"  {inner}: {row}\n" for inner, row in value.items())
            text += f"{key}:\n{rows}"
        else:
            text += f"{key}: {value}\n"
    return text.encode()


def _check_events(path: Path, text: str) -> None:
    """Depth and anchors, before the parser that calls itself for each level sees the text."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise FormatError(
                str(path), f"refers to the anchor {short(event.anchor)}: spell it out"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEEPEST:
            raise FormatError(str(path), f"is not read: nested deeper than {DEEPEST} levels")


def _value(path: Path, node: yaml.Node | None) -> object:
    if isinstance(node, yaml.MappingNode):
        return _mapping(path, node)
    if isinstance(node, yaml.SequenceNode):
        return [_value(path, inner) for inner in node.value]
    if not isinstance(node, yaml.ScalarNode):
        return None
    if not node.style and WHOLE.fullmatch(node.value):
        return int(node.value)
    return None if node.value in ("", "~", "null") else node.value


def _mapping(path: Path, node: yaml.MappingNode) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in node.value:
        name = str(key.value)
        if name in found:
            raise FormatError(str(path), f"key {short(name)} is given twice")
        found[name] = _value(path, value)
    return found


def _problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} at line {mark.line + 1}, column {mark.column + 1}"
    return str(error).partition("\n")[0]
