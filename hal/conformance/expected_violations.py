"""Violations that an implementation knows of: a file that it owns, read and compared with a run.

TOML, because Python reads it without a package. One table per deviation:

    [[expected]]
    clause = "K5"
    property = "result-does-not-block-after-done"   # optional: only this property
    reason = "a completed operation may still time out"
    link = "https://example.org/issues/30723"       # optional
    shows = "sometimes"                             # optional; "always" unless said
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from equipoise.hal.conformance import suite
from equipoise.hal.conformance.clauses import HANG, SIGNATURES, TITLES
from equipoise.hal.errors import UsageError

TABLE = "expected"
KEYS = ("clause", "property", "reason", "link", "shows")
ANY_PROPERTY = (HANG, SIGNATURES)
"""Any property may find these: a rank that does not answer, a method that is not there."""


class Shows(StrEnum):
    """How often a deviation shows."""

    ALWAYS = "always"
    """In every run: that it does not show is an error, so that the file stays true."""
    SOMETIMES = "sometimes"
    """A race: that it does not show is told, and fails nothing."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """A clause that is known to be violated.

    Attributes:
        clause: the clause.
        reason: why, in the implementation's words.
        property: the property that shows it; empty for any.
        link: where it is tracked, or empty.
        shows: how often.
    """

    clause: str
    reason: str
    property: str = ""
    link: str = ""
    shows: Shows = Shows.ALWAYS

    def covers(self, property_name: str, clause: str) -> bool:
        """Whether a violation of `clause` that this property found is the expected one."""
        return clause == self.clause and self.property in ("", property_name)

    def __str__(self) -> str:
        return f"{self.clause} by {self.property}" if self.property else self.clause


def parse_expectations(text: str) -> tuple[Expectation, ...]:
    """The deviations that a file lists.

    Raises `UsageError`, in one line: not TOML, a key, clause or property that does not exist, a
    property that does not judge the clause, no reason, or a deviation listed twice.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"is not TOML: {error}") from error
    tables = content.pop(TABLE, [])
    if content:
        raise UsageError(f"unknown key {next(iter(content))!r}: expected [[{TABLE}]] and no other")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"expected tables [[{TABLE}]], got {TABLE} = {tables!r}")
    expectations: dict[tuple[str, str], Expectation] = {}
    for number, table in enumerate(tables, 1):
        try:
            entry = _expectation(table)
        except ValueError as error:
            raise UsageError(f"[[{TABLE}]] number {number}: {error}") from error
        if (entry.clause, entry.property) in expectations:
            raise UsageError(f"[[{TABLE}]] number {number}: {entry} is listed twice")
        expectations[entry.clause, entry.property] = entry
    return tuple(expectations.values())


def _expectation(table: Mapping[str, Any]) -> Expectation:
    """Raises `ValueError` with what is wrong."""
    for key, value in table.items():
        if key not in KEYS:
            raise ValueError(f"unknown key {key!r}{_suggestion(key, KEYS)}")
        if not isinstance(value, str):
            raise ValueError(f"{key} must be a text, got {value!r}")
    clause, name = table.get("clause", ""), table.get("property", "")
    if clause not in TITLES:
        known = _suggestion(clause.upper(), tuple(TITLES))
        raise ValueError(f"unknown clause {clause!r}{known}" if clause else "no clause")
    if not table.get("reason", "").strip():
        raise ValueError(f"{clause}: no reason is given")
    if table.get("shows", Shows.ALWAYS) not in list(Shows):
        raise ValueError(f"shows must be {' or '.join(Shows)}, got {table['shows']!r}")
    if name:
        _check_property(clause, name)
    values = {**table, "shows": Shows(table.get("shows", Shows.ALWAYS))}
    return Expectation(**values)


def _check_property(clause: str, name: str) -> None:
    properties = {prop.name: prop for prop in suite.properties()}
    if name not in properties:
        raise ValueError(f"unknown property {name!r}{_suggestion(name, tuple(properties))}")
    if clause not in (*properties[name].clauses, *ANY_PROPERTY):
        judged = ", ".join(properties[name].clauses)
        raise ValueError(f"{name} judges {judged}, not {clause}")


def _suggestion(word: str, known: tuple[str, ...]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
