"""The configuration file: YAML, one key per option."""

from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from equipoise.hal.errors import UsageError
from equipoise.input_files import read_input
from equipoise.option import Option


def read_config(path: Path, known: Mapping[str, Option]) -> dict[str, Any]:
    """The options that a file sets, out of the `known` ones, each of its own kind.

    Raises UsageError, in one line that names the file and the key: unreadable, not YAML, not a
    mapping, a key unknown or given twice, a value of another kind.
    """
    items = _mapping(path, _text(path)).items()
    return {str(key): _value(path, known, key, value) for key, value in items}


def _text(path: Path) -> str:
    try:
        return read_input(path).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 at byte offset {error.start}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _mapping(path: Path, text: str) -> dict[object, object]:
    try:
        _refuse_repeated_keys(path, yaml.compose(text, Loader=yaml.SafeLoader), set())
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {_problem(error)}") from None
    except (ValueError, RecursionError) as error:
        # The loader lets through what a date that does not exist, or a thousand brackets, raise.
        raise UsageError(f"{path} is not YAML: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not a mapping of options to values")
    return document


def _refuse_repeated_keys(path: Path, node: object, visited_ids: set[int]) -> None:
    """Refuse what the loader would silently resolve to the last; aliases may form a circle."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in visited_ids:
        return
    visited_ids.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(path, item, visited_ids)
        return
    keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
    for key, count in keys.items():
        if count > 1:
            raise UsageError(
                f"{path}: key {key!r} is given twice from line {node.start_mark.line + 1} on"
            )
    for _, value in node.value:
        _refuse_repeated_keys(path, value, visited_ids)


def _problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} at line {mark.line + 1}, column {mark.column + 1}"
    return str(error).splitlines()[0]


def _value(path: Path, options: Mapping[str, Option], key: object, value: object) -> object:
    option = options.get(key) if isinstance(key, str) else None
    if option is None:
        close = get_close_matches(str(key), list(options), n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(options)}"
        raise UsageError(f"{path}: unknown key {key!r}{hint}")
    try:
        return option.kind.from_yaml(value)
    except ValueError:
        expected = f"expected {option.kind.expected}, got {value!r}"
        raise UsageError(f"{path}: key {key!r}: {expected}") from None
