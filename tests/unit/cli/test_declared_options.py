"""What holds of every option of every command, as it is declared at the field that it sets."""

import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cli.completion import SHELLS, render_completion
from equipoise.cli.kinds import REALS, WHOLES
from equipoise.cli.parser import COMMANDS, load_command
from equipoise.hal.errors import UsageError
from equipoise.option import REAL, SECONDS, WHOLE, Kind, Option

ARGUMENTS = {
    **dict.fromkeys(("plan", "report", "advise", "replay", "route-report"), ("in.npy",)),
    "convert": ("in.npy", "out.json"),
}
"""Those without a flag; nothing is read before the options are."""
WIDTHS = 60, 80, 120
BASH = shutil.which("bash")


def every_option() -> Iterator[tuple[str, Option]]:
    for name in COMMANDS:
        for option in load_command(name).options.values():
            yield name, option


def words_of(name: str) -> tuple[str, ...]:
    return (*name.split(), *ARGUMENTS.get(name, ()))


def help_of(call: Callable[..., Any], capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit) as exit_info:
        call(*words)
    assert exit_info.value.code == 0
    return capsys.readouterr().out.splitlines()


def listed_flags(lines: list[str]) -> set[str]:
    """The options that have lines of their own."""
    heads = [line.split("  ")[1] for line in lines if re.match(r"  -", line)]
    return {flag for head in heads for flag in re.findall(r"--[a-z-]+", head)}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_shows_rare_options_and_help_does_not(
    equipoise: Callable[..., Any], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    options = load_command(name).options.values()
    rare = {option.name for option in options if option.rare}
    shown = listed_flags(help_of(equipoise, capsys, *name.split(), "--help"))
    assert {option.name for option in options} - rare <= shown
    assert not shown & rare
    assert ("--help-all" in shown) == bool(rare)
    if rare:
        shown = listed_flags(help_of(equipoise, capsys, *name.split(), "--help-all"))
        assert {option.name for option in options} <= shown


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_is_as_wide_as_the_terminal_but_for_examples(
    equipoise: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    width: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = help_of(equipoise, capsys, *name.split(), "--help")
    assert lines[1] == "", "one line of usage"
    text = lines[: lines.index("examples:")] if "examples:" in lines else lines
    # A line with a single long word, such as the choices of an option, cannot be broken.
    breakable = [line for line in text if len(line.split()) > 2 and " " in line.strip()]
    assert [line for line in breakable if len(line) > width] == []


def test_every_option_has_help_a_group_and_a_shown_default() -> None:
    for name, option in every_option():
        assert option.help, (name, option.key)
        assert option.group, (name, option.key)
        assert option.shown_default, (name, option.key)
        assert option.needs is None or option.needs[0] in load_command(name).options


RANGED = [
    pytest.param(name, option, id=f"{name} {option.name}")
    for name, option in every_option()
    if option.least is not None
]
REAL_OPTIONS = [
    pytest.param(name, option, id=f"{name} {option.name}")
    for name, option in every_option()
    if option.kind in (REAL, SECONDS)
]


@pytest.mark.parametrize(("name", "option"), RANGED)
def test_number_out_of_range_is_refused_by_name(
    equipoise: Callable[..., Any], tmp_path: Path, name: str, option: Option
) -> None:
    """Below the range on the command line, above it in a file."""
    assert option.least is not None
    below = option.least if option.above else option.least - 1
    cases: list[tuple[str, ...]] = [(f"{option.name}={below}",)]
    if option.most is not None:
        (tmp_path / "c.yaml").write_text(f"{option.key}: {option.most + 1}\n")
        cases.append(("--config", "c.yaml"))
    for words in cases:
        answer = equipoise(*words_of(name), *words)
        assert (answer.code, answer.out) == (2, "")
        [line] = answer.err.splitlines()
        assert line.startswith(f"equipoise: error: {option.name} must be {option.range}, got ")


@pytest.mark.parametrize(("name", "option"), REAL_OPTIONS)
def test_number_that_is_none_is_refused(
    equipoise: Callable[..., Any], tmp_path: Path, name: str, option: Option
) -> None:
    (tmp_path / "c.yaml").write_text(f"{option.key}: .inf\n")
    for words in ((f"{option.name}=nan",), ("--config", "c.yaml")):
        answer = equipoise(*words_of(name), *words)
        assert (answer.code, answer.out) == (2, "")
        assert f"expected {option.kind.expected}, got " in answer.err


@given(
    least=st.integers(-5, 5), room=st.integers(0, 9) | st.none(), above=st.booleans(),
    value=st.floats(-20, 20) | st.integers(-20, 20),
)  # fmt: skip
def test_option_takes_exactly_the_numbers_of_its_range(
    least: int, room: int | None, above: bool, value: float
) -> None:
    most = None if room is None else least + room
    option = Option("x", "y", kind=REAL, least=least, most=most, above=above, key="some_key")
    inside = (value > least if above else value >= least) and (most is None or value <= most)
    if inside:
        option.check(value)
        option.check((least + 1 if above else least, value) if room != 0 or not above else value)
    else:
        with pytest.raises(UsageError, match=r"^--some-key must be "):
            option.check(value)
        with pytest.raises(UsageError, match=r"^--some-key must be "):
            option.check((value,))


@given(numbers=st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=4))
def test_numbers_read_alike_from_line_and_file(numbers: list[int]) -> None:
    def same(kind: Kind, text: str, value: object) -> bool:
        return kind.from_text(text) == kind.from_yaml(value)

    first, text = numbers[0], ",".join(map(str, numbers))
    assert same(WHOLE, str(first), first)
    assert same(REAL, str(first), first)
    assert same(WHOLES, text, numbers)
    assert same(REALS, text, [float(number) for number in numbers])
    assert WHOLES.from_yaml(text) == WHOLES.from_yaml(numbers)


@given(value=st.floats(allow_nan=True, allow_infinity=True))
def test_reals_are_finite(value: float) -> None:
    if math.isfinite(value):
        assert REAL.from_text(repr(value)) == REAL.from_yaml(value) == value
        return
    with pytest.raises(ValueError, match=r"nan|inf"):
        REAL.from_text(repr(value))
    with pytest.raises(ValueError, match=r"nan|inf"):
        REAL.from_yaml(value)


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_command_and_option(shell: str) -> None:
    script = render_completion(shell)
    for name, option in every_option():
        assert name.split()[0] in script
        assert option.name.removeprefix("--") in script, (name, option.name)


def test_completion_of_an_unknown_shell_is_refused(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("--print-completion", "dos")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        "equipoise: error: --print-completion: unknown shell 'dos'; known: bash, zsh, fish, tcsh\n"
    )


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (("p",), {"plan", "picker", "policy-server"}),
        (("plan", "--pol"), {"--policy"}),
        (("plan", "--policy", ""), {"greedy", "connected", "incremental"}),
        (("run", "--shares", "l"), {"lagged", "local"}),
        (("bench", ""), {"serve"}),
        (("run", "--tensor"), {"--tensor-ranks"}),
        (("plan", "x", "--out", "fi"), {"file"}),
    ],
)
def test_bash_completes_commands_options_words_and_files(
    tmp_path: Path, words: tuple[str, ...], completions: set[str]
) -> None:
    assert BASH is not None
    (tmp_path / "file").touch()
    (tmp_path / "script").write_text(render_completion("bash"))
    typed = " ".join(f"'{word}'" for word in ("equipoise", *words))
    program = (
        f"source ./script; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; "
        '_shtab_equipoise; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [BASH, "--norc", "-c", program],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=dict(os.environ), timeout=60,
    )  # fmt: skip
    assert completions <= {word.strip() for word in done.stdout.split()}
