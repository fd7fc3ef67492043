"""Commands and options that are mistyped, or missing altogether."""

from collections.abc import Callable
from typing import Any

import pytest

MISTYPED = {
    "an unknown option before any command": (("--nope",), "unknown option --nope: see equipoise"),
    "a mistyped option": (
        ("plan", "x", "--rank", "2"),
        "unknown option --rank; did you mean --ran",
    ),
    "a mistyped option with a value": (
        ("run", "--stepz=2"),
        "unknown option --stepz; did you mean",
    ),
    "a mistyped command": (("pln", "x"), "unknown command 'pln'; did you mean plan?"),
    "a command like none": (("zzz",), "unknown command 'zzz'; known: run, record, conformance"),
    "an option as a command": (("help", "plan"), "unknown command 'help'; did you mean --help?"),
    "a mistyped subject": (("bench", "srve"), "unknown command 'srve'; did you mean serve?"),
    "an option that no command is before": (("--rank", "32"), "unknown option --rank: see equip"),
    "a missing argument": (("plan",), "STATS is missing: see equipoise plan --help"),
    "a missing subject": (("bench",), "SUBJECT is missing: see equipoise bench --help"),
    "an option without its value": (("plan", "x", "--ranks"), "--ranks needs a value: see equip"),
    "two hyphens for a value": (("plan", "x", "--out=--"), "--out needs a value"),
    "a value of a switch": (("plan", "x", "--quiet=1"), "--quiet takes no value, got '1'"),
    "an argument too many": (
        ("doctor", "here"),
        "unexpected argument 'here': see equipoise doctor",
    ),
}


@pytest.mark.parametrize(("words", "message"), MISTYPED.values(), ids=MISTYPED.keys())
def test_mistyped_word_is_named_with_what_was_meant(
    equipoise: Callable[..., Any], words: tuple[str, ...], message: str
) -> None:
    answer = equipoise(*words)
    assert (answer.code, answer.out) == (2, "")
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line


def test_program_without_arguments_shows_help(equipoise: Callable[..., Any]) -> None:
    answer = equipoise()
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("usage: equipoise ")
    assert "doctor" in answer.out
