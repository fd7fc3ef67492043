"""The grammar of the command line."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from equipoise import __version__
from equipoise.cli import conformance_options
from equipoise.cli.kinds import FAMILY_NAMES, SWITCH, TEXTS, Kind
from equipoise.cli.options import OPTIONS, Option, default_of
from equipoise.demo.settings import Balance
from equipoise.hal.errors import UsageError

DESCRIPTION = "Keeps Mixture-of-Experts serving in balance on any accelerator."
EXAMPLES = """\
examples:
  equipoise run                             four ranks, shipped texts, a report
  equipoise run --ranks 2 --slots 36        two ranks with four redundant experts
  equipoise run --text a.txt b.txt          your own texts, one phase each
  equipoise run --config run.yaml --json figures.json
"""
RUN = """\
Serve real text through the shipped Mixture-of-Experts model on several ranks
while its kind switches, balance the experts online, and compare every output
with one process that does neither."""
CONFIG = """\
A configuration file is YAML with the long names as keys and underscores for
hyphens, such as `window_size: 4`; the command line overrides it.

exit code: 0 outputs identical and balancing exercised, 1 one of them not,
2 bad input, 3 the run failed, 130 interrupted, 128 + n ended by signal n"""
CONFORMANCE = """\
Try to break a backend: properties of every clause of the contract, on programs
that are drawn, and shrunk when one fails. One line for each clause: held,
violated with the smallest program found, or unsupported by declaration."""
CONFORMANCE_EXAMPLES = """\
examples:
  equipoise conformance --backend cpu --ranks 4
  equipoise conformance --backend virtual --only ordering locks
  equipoise conformance --backend my_package.backend:BACKEND --html report.html
  mpiexec -n 4 equipoise conformance --backend cpu --communicator mpi

exit code: 0 every clause held or is declared unsupported, 1 one is violated,
2 bad input, 3 the suite could not run, 130 interrupted"""
DOCTOR = "Say what was found on this machine, what is missing and why."


LISTS = (TEXTS, FAMILY_NAMES)
"""Kinds of which an option takes several."""


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print two lines and exit."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(message)


def build_parser() -> Parser:
    """Every command that exists; parsing raises UsageError for bad input."""
    parser = Parser(
        prog="equipoise",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"equipoise {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_conformance(commands)
    _add_doctor(commands)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="serve real text on several ranks, balanced, and report",
        description=RUN,
        epilog=f"{EXAMPLES}\n{CONFIG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    _add_options(run, OPTIONS)


def _add_conformance(commands: Any) -> None:
    conformance = commands.add_parser(
        "conformance",
        help="does a backend keep the contract, clause by clause?",
        description=CONFORMANCE,
        epilog=CONFORMANCE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    _add_options(conformance, conformance_options.OPTIONS)


def _add_options(command: Any, options: Sequence[Option]) -> None:
    groups = {
        name: command.add_argument_group(name) for name in dict.fromkeys(o.group for o in options)
    }
    for option in options:
        _add_option(groups[option.group], option)
    command.add_argument("--config", type=Path, metavar="FILE", help="read options from YAML")


def _add_option(group: Any, option: Option) -> None:
    text = f"{option.help} (default: {default_of(option)})".replace("%", "%%")
    if option.key == "balance":
        group.add_argument(
            option.name, dest="balance", action="store_const", const=Balance.OFF, help=text
        )
    elif option.kind is SWITCH:
        group.add_argument(option.name, action="store_true", help=text)
    else:
        group.add_argument(
            option.name,
            dest=option.key,
            type=_reader(option.kind),
            metavar=option.metavar,
            nargs="+" if option.kind in LISTS else None,
            # A second --text adds to the first; of anything single the last one counts.
            action="extend" if option.kind in LISTS else "store",
            help=text,
        )


def _reader(kind: Kind) -> Callable[[str], object]:
    def read(text: str) -> object:
        try:
            return kind.from_text(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {kind.word}, got {text!r}") from None

    return read


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what this machine has, what is missing and why",
        description=f"{DOCTOR} Exit code 0 if an accelerator works, 1 otherwise.",
        allow_abbrev=False,
    )
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too")
