"""Commands in `--help` can be pasted, and pages list the folders that there are."""

import re
from collections.abc import Iterator

import pytest
from helpers.paths import ROOT

from equipoise.cli.parser import build_parser

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# The candidates of `equipoise replay` begin with the same word, as in "equipoise static".
UNCOMMENTED = re.compile(
    r"^\s*(\$ )?equipoise (?!(static|lagged|local|node|exact) )[^#]*\S {2,}[^#\s\\]"
)
SERVE = re.compile(r"^vllm serve (?:.*\\\n)*.*$", re.MULTILINE)
FOLDER = re.compile(r"`([a-z_0-9/]+)/`")
LISTED_BELOW = ("backends", "balancer", "src/equipoise")


def command_helps() -> Iterator[str]:
    """The help of every command."""
    parser = build_parser()
    yield parser.format_help()
    for action in parser._subparsers._group_actions:  # type: ignore[union-attr]
        yield from (command.format_help() for command in action.choices.values())  # type: ignore[union-attr]


def test_text_after_command_in_help_is_a_comment() -> None:
    lines = [line for text in command_helps() for line in text.splitlines()]
    assert len(lines) > 100
    assert [line for line in lines if UNCOMMENTED.match(line)] == []


@pytest.mark.parametrize("word", ["none: has to be given", "(default: required)"])
def test_help_says_required_for_options_without_default(word: str) -> None:
    lines = " ".join(" ".join(command_helps()).split())
    assert "write the placement there (required)" in lines
    assert word not in lines


def test_vllm_commands_with_eplb_have_several_ranks() -> None:
    """vLLM refuses `--enable-eplb` on one expert-parallel rank (`ParallelConfig`)."""
    commands = [
        command
        for path in PAGES
        for command in SERVE.findall(path.read_text(encoding="utf-8"))
        if "--enable-eplb" in command
    ]
    assert commands != []
    assert [c for c in commands if not re.search(r"--(tensor|data)-parallel-size [2-9]", c)] == []


def test_architecture_page_lists_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    page_packages = {
        name for row in text.splitlines() if row[:2] == "| " for name in FOLDER.findall(row)
    }
    there = {
        str(init.parent.relative_to(ROOT))
        for folder in LISTED_BELOW
        for init in (ROOT / folder).glob("*/__init__.py")
        if not init.parent.is_symlink()  # a link: listed by its own path
    }
    assert there - page_packages == set()
