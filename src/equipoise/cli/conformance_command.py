"""The command `equipoise-conformance`: `equipoise conformance`, without the rest of the package."""

import shlex
import sys
from collections.abc import Sequence

from equipoise import __version__
from equipoise.cli.command import Parser
from equipoise.cli.conformance_options import command_of
from equipoise.cli.exit_code import run_to_exit_code

PROGRAM = "equipoise-conformance"


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; exit codes as those of `equipoise conformance`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_to_exit_code(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    command, parser = command_of(PROGRAM), Parser(prog=PROGRAM)
    # PyYAML is none of its requirements.
    command.fill(parser, has_file=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    try:
        request = command.read(vars(parser.parse_args(arguments)))
        return command.run(request, shlex.join([PROGRAM, *arguments]))
    finally:
        sys.stdout.flush()  # an output that is full is noticed here


if __name__ == "__main__":
    sys.exit(main())
