"""Serving engines that installed integrations know: `equipoise doctor --NAME`.

The parser needs their names, so this module must not import torch.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from equipoise.cli.files import write_file
from equipoise.option import SWITCH, Option


@dataclass(frozen=True)
class DoctorCheck:
    """Something that is so or is not; `detail` says what, or what would help.

    `passed` is None where it cannot be had, whatever is done about it, and `detail` says why.
    """

    name: str
    passed: bool | None
    detail: str


GROUP = "equipoise.engines"
"""Entry points: functions that give (what, whether it is so, detail) one after the other; None for
what an engine has no place for, which is no fault."""


def installed() -> tuple[str, ...]:
    """Names of engines, sorted; nothing is imported."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def examine(name: str) -> tuple[DoctorCheck, ...]:
    """What is found of one engine; an integration that does not import is a finding."""
    (point,) = entry_points(group=GROUP, name=name)
    try:
        look: Callable[[], Iterable[tuple[str, bool | None, str]]] = point.load()
        return tuple(DoctorCheck(*row) for row in look())
    except Exception as error:  # whatever an engine does when it is imported
        return (DoctorCheck(name, passed=False, detail=f"cannot be looked at: {error}"),)


def options() -> dict[str, Option]:
    """A switch for each of them, by key; the key of `--vllm` is the name of an engine."""
    return {
        name: Option(
            f"instead: whether the {name} that is installed can be served, part by part",
            "serving engines",
            kind=SWITCH,
            key=name,
            value=False,
        )
        for name in installed()
    }


def write(path: Path, checks_by_engine: dict[str, tuple[DoctorCheck, ...]]) -> None:
    """The findings as JSON: by engine, a list of checks."""
    plain = {name: [vars(check) for check in checks] for name, checks in checks_by_engine.items()}
    write_file(path, json.dumps(plain, indent=2) + "\n")
