"""A command of the program: its options, as they are declared, parsed and put together."""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

from equipoise.hal.errors import UsageError
from equipoise.option import OUTPUT, PATH, SWITCH, Kind, Option, arguments_of, flag_of, options_of

CHOICE = re.compile(r"argument (?:COMMAND|SUBJECT): invalid choice: '(.*?)' \(choose from (.*)\)")
MAX_SHOWN = 100_000
"""Upper limits beyond it keep numbers within what can be computed: `--help` does not name them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a command that shows progress."""

    quiet: Annotated[bool, Option("no progress and no names of written files", OUTPUT)] = False

    @property
    def progress(self) -> str:
        """`shown` or `hidden`."""
        return "hidden" if self.quiet else "shown"


class Command:
    """A command: the settings that it takes, what `--help` says of it, and what runs it.

    Attributes:
        run: called with the settings and the command line; returns the exit code.
    """

    def __init__(
        self,
        settings: type,
        run: Callable[[Any, str], int],
        *,
        description: str,
        examples: str = "",
        options: Callable[[], Mapping[str, Option]] | None = None,
        has_file: bool = True,
        request_of: Callable[[Mapping[str, Any], Mapping[str, Any]], Any] | None = None,
    ) -> None:
        """Of settings.

        Args:
            settings: a dataclass whose fields declare options and arguments.
            run: see above.
            description: what it does, a paragraph.
            examples: what follows the options in `--help`.
            options: gives them by key, where they are not those of the settings alone.
            has_file: whether it reads a configuration file.
            request_of: makes the settings of what the command line says, and what the file says;
                needed where the command line is not simply put over the file.
        """
        self.run = run
        self._options = options or (lambda: options_of(settings))
        self._settings, self._arguments = settings, arguments_of(settings)
        self._description, self._examples = description, examples
        self._has_file = has_file
        self._request_of = request_of or self._line_over_file

    @property
    def options(self) -> Mapping[str, Option]:
        """By key."""
        return self._options()

    def fill(self, parser: "Parser", *, has_file: bool = True) -> None:
        """Give a parser everything that belongs to the command."""
        words = "".join(f" {argument.metavar}" for argument in self._arguments)
        parser.usage = f"%(prog)s{words} [options]"
        parser.description, parser.epilog = self._description, self._examples
        for argument in self._arguments:
            parser.add_argument(
                argument.key, type=_reader(PATH), metavar=argument.metavar, help=argument.help
            )
        parser.add_options(self.options.values())
        if self._has_file and has_file:
            parser.add_argument(
                "--config", type=_reader(PATH), metavar="FILE", help="read options from YAML"
            )

    def read(self, arguments: Mapping[str, Any]) -> Any:
        """The settings: command line over configuration file over default. Raises UsageError."""
        known = {*self.options, *(argument.key for argument in self._arguments)}
        line = {key: _value(key, value) for key, value in arguments.items() if key in known}
        file: Mapping[str, Any] = {}
        if "config" in arguments:
            # Imported here: PyYAML is not needed where there is no such file.
            from equipoise.cli.config import read_config

            file = read_config(arguments["config"], self.options)
        return self.request(line, file)

    def request(self, line: Mapping[str, Any], file: Mapping[str, Any]) -> Any:
        """The same, of values by key. Raises UsageError, for each that is out of range too."""
        options, values = self.options, {**file, **line}
        named = [option for key, option in options.items() if key in values]
        for option in named:
            option.check(values[option.key])
        for option in named:
            option.check_needs(values)
        for option in options.values():
            if option.why_required and option.key not in values:
                raise UsageError(f"{option.flags[0]} is needed: {option.why_required}")
        return self._request_of(line, file)

    def _line_over_file(self, line: Mapping[str, Any], file: Mapping[str, Any]) -> Any:
        options = self.options
        names = {key: option.field for key, option in options.items()}
        return self._settings(
            **{names.get(key, key): value for key, value in {**file, **line}.items()}
        )


def _value(key: str, value: object) -> object:
    if value == []:  # what argparse makes of `--out=--`
        raise UsageError(f"{flag_of(key)} needs a value")
    return tuple(value) if isinstance(value, list) else value


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print two lines and exit; leaves rare options out of `--help`.

    Attributes:
        declared: what was added for which option.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            **settings,
        )
        # Values such as -5-10: no option of ours begins with a digit.
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")
        self._positionals.title = "arguments"
        self._rare: list[tuple[argparse.Action, str]] = []
        self.declared: list[tuple[argparse.Action, Option]] = []

    def add_options(self, options: Iterable[Option]) -> None:
        """Add options under the headings of their groups, output last."""
        options = sorted(options, key=lambda option: option.group == OUTPUT)
        names = dict.fromkeys(option.group for option in options)
        headings = {name: self.add_argument_group(name) for name in names}
        for option in options:
            action = _add_option(headings[option.group], option)
            self.declared.append((action, option))
            if option.rare:
                self._rare.append((action, str(action.help)))
                action.help = argparse.SUPPRESS
        if self._rare:
            self.add_argument(
                "--help-all", action=_HelpAll, nargs=0, dest=argparse.SUPPRESS,
                help=f"show all options, also {len(self._rare)} that few need",
            )  # fmt: skip

    def show_all(self) -> None:
        """Have help of rare options too."""
        for action, text in self._rare:
            action.help = text

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # typeshed overloads it
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """See argparse; raises UsageError for what this command does not know.

        Here, and not in `parse_args`: a command is parsed by a parser of its own, which alone has
        the options that may have been meant.
        """
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            raise UsageError(self._unknown(unknown[0].partition("=")[0]))
        return options, unknown

    def refuse_unknown(self, words: Iterable[str]) -> None:
        """Raises UsageError for an option that there is not."""
        for word in words:
            flag = word.partition("=")[0]
            if flag.startswith("-") and flag not in self._option_string_actions:
                raise UsageError(self._unknown(flag))

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        mistyped = CHOICE.match(message)
        if mistyped is None:
            raise UsageError(self._words(message))
        names = re.findall(r"[\w-]+", mistyped[2])
        word, flag = mistyped[1], f"--{mistyped[1]}"
        hint = suggestion(word, names) or f"; known: {', '.join(names)}"
        if flag in self._option_string_actions:
            hint = f"; did you mean {flag}?"
        raise UsageError(f"unknown command {word!r}{hint}")

    def _words(self, message: str) -> str:
        """What argparse says, in words of this program."""
        place, _, problem = message.removeprefix("argument ").partition(": ")
        if place == "the following arguments are required":
            return f"{problem} is missing: see {self.prog} --help"
        if problem.startswith("ignored explicit argument "):
            return (
                f"{place} takes no value, got {problem.removeprefix('ignored explicit argument ')}"
            )
        if problem in ("expected one argument", "expected at least one argument"):
            return f"{place} needs a value: see {self.prog} --help"
        return f"{place}: {problem}" if problem else place

    def _print_message(self, message: str, file: Any = None) -> None:
        # Not argparse's, which hides that an output is full.
        print(message, end="", file=file or sys.stdout)

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}: see {self.prog} --help"
        hint = suggestion(word, self._option_string_actions) or f": see {self.prog} --help"
        return f"unknown option {word}{hint}"


class _HelpFormatter(argparse.HelpFormatter):
    """As wide as the terminal, but for examples, which can be pasted."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return super()._fill_text(text, width, indent)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.show_all()
        parser.print_help()
        parser.exit()
        raise AssertionError  # `exit` does not return


def suggestion(word: str, names: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing where no name is like the word."""
    close = get_close_matches(word, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _add_option(group: Any, option: Option) -> argparse.Action:
    note = option.shown_default if option.why_required else f"default: {option.shown_default}"
    if option.most is not None and option.most <= MAX_SHOWN:
        note = f"{option.range}; {note}"
    needs = f"; needs {flag_of(option.needs[0])}" if option.needs else ""
    text = f"{option.help}{needs} ({note})".replace("%", "%%")
    if option.kind is SWITCH:
        action = group.add_argument(option.name, dest=option.key, action="store_true", help=text)
    else:
        action = group.add_argument(
            *option.flags,
            dest=option.key,
            type=_reader(option.kind),
            metavar=option.metavar or option.kind.metavar,
            nargs="+" if option.kind.several else None,
            # A second --text adds to the first; of anything single the last one counts.
            action="extend" if option.kind.several else "store",
            help=text,
        )
    assert isinstance(action, argparse.Action)
    return action


def _reader(kind: Kind) -> Callable[[str], object]:
    """What argparse calls with a text of that kind."""

    def read(text: str) -> object:
        try:
            return kind.from_text(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {kind.expected}, got {text!r}") from None

    return read
