"""Parses the options of a command, as `option.py` declares them; errors are one line."""

import argparse
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from equipoise.cli.option import REQUIRED, Option
from equipoise.cli.option_kinds import SWITCH, OptionKind
from equipoise.hal.errors import UsageError

CHOICE = re.compile(r"argument (?:COMMAND|SUBJECT): invalid choice: '(.*?)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print two lines and exit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Values such as -5-10: no option of ours begins with a digit.
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """See argparse; raises UsageError for what this command does not know.

        Here, and not in `parse_args`: a command is parsed by a parser of its own, which alone has
        the options that may have been meant.
        """
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            raise UsageError(self._unknown(unknown[0].partition("=")[0]))
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        mistyped = CHOICE.match(message)
        if mistyped is None:
            raise UsageError(message)
        names = re.findall(r"[\w-]+", mistyped[2])
        raise UsageError(f"unknown command {mistyped[1]!r}{_suggestion(mistyped[1], names)}")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}: see {self.prog} --help"
        flags = [flag for action in self._actions for flag in action.option_strings]
        close = get_close_matches(word, flags, n=1)
        return f"unknown option {word}" + (
            f"; did you mean {close[0]}?" if close else f": see {self.prog} --help"
        )


def _suggestion(word: str, names: Sequence[str]) -> str:
    close = get_close_matches(word, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names)}"


def add_command(commands: Any, name: str, about: str, description: str, epilog: str) -> Any:
    """The parser of a command."""
    return commands.add_parser(
        name,
        help=about,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )


def shown_default(option: Option) -> str:
    """What `--help` says of an option that is of no settings."""
    return option.shown_default


def add_options(
    command: Any, options: Sequence[Option], default_of: Callable[[Option], str] = shown_default
) -> None:
    """Add the options of a command under the headings of their groups."""
    groups = {
        name: command.add_argument_group(name) for name in dict.fromkeys(o.group for o in options)
    }
    for option in options:
        _add_option(groups[option.group], option, default_of(option))


def _add_option(group: Any, option: Option, default: str) -> None:
    note = default if default == REQUIRED else f"default: {default}"
    text = f"{option.help} ({note})".replace("%", "%%")
    if option.kind is SWITCH:
        group.add_argument(option.name, action="store_true", help=text)
    else:
        group.add_argument(
            *option.flags,
            dest=option.key,
            type=reader(option.kind),
            metavar=option.metavar,
            nargs="+" if option.kind.several else None,
            # A second --text adds to the first; of anything single the last one counts.
            action="extend" if option.kind.several else "store",
            help=text,
        )


def reader(kind: OptionKind) -> Callable[[str], object]:
    """What argparse calls with a text of that kind."""

    def read(text: str) -> object:
        try:
            return kind.from_text(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {kind.expected}, got {text!r}") from None

    return read
