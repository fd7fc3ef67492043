"""Completion of commands and options in shells, as a script that they read once."""

import argparse

import shtab

from equipoise.cli.command import Parser
from equipoise.cli.parser import build_parser
from equipoise.hal.errors import UsageError

SHELLS = "bash", "zsh", "fish", "tcsh"
"""Those that the tests complete in; shtab has more."""
FILES, FOLDERS = ("FILE", "DIR|FILE", "NAME|FILE"), ("DIR",)
"""Values of options, as `--help` names them."""


def render_completion(shell: str) -> str:
    """The script for a shell: nothing of the program runs when a word is completed.

    Raises UsageError for a shell that has none.
    """
    if shell not in SHELLS:
        known = ", ".join(SHELLS)
        raise UsageError(f"--print-completion: unknown shell {shell!r}; known: {known}")
    parser = build_parser()
    _prepare(parser)
    return str(shtab.complete(parser, shell))


def _prepare(parser: argparse.ArgumentParser) -> None:
    """Show rare options too, and say which take a file, and which one of a few words."""
    assert isinstance(parser, Parser)
    parser.show_all()
    words = {action: option.kind.words for action, option in parser.declared}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _prepare(command)
        elif words.get(action):
            # Only here: argparse would refuse other words in a sentence of its own.
            action.choices = words[action]
        elif action.metavar in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # shtab looks there
        elif action.metavar in FILES or not action.option_strings:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
