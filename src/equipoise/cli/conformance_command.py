"""The command `equipoise-conformance`: `equipoise conformance`, without the rest of the package."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from equipoise import __version__
from equipoise.cli import conformance_options
from equipoise.cli.exit_code import run_to_exit_code
from equipoise.cli.option_parser import Parser, add_options
from equipoise.hal.conformance.reproduce import set_library_defaults

PROGRAM = "equipoise-conformance"


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; exit codes as those of `equipoise conformance`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_to_exit_code(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    try:
        options = _parser().parse_args(arguments)
        set_library_defaults()
        # Imported here: torch takes a second that `--help` need not wait for.
        from equipoise.cli.conformance import conformance

        return conformance(options, shlex.join([PROGRAM, *arguments]))
    finally:
        sys.stdout.flush()  # an output that is full is noticed here


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description=conformance_options.DESCRIPTION,
        epilog=conformance_options.EXAMPLES.format(command=PROGRAM),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    add_options(parser, conformance_options.OPTIONS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
