"""Entry point of the command line: parses arguments, runs a command, returns its exit code."""

import shlex
import sys
from collections.abc import Sequence

from equipoise.cli.exit_code import run_to_exit_code
from equipoise.cli.parser import build_parser, read_request


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors on purpose become one line on standard error.

    Exit codes: what the command returns, or those of `run_to_exit_code`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_to_exit_code(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    try:
        command, request = read_request(arguments)
        if command is not None:
            return command.run(request, shlex.join(["equipoise", *arguments]))
        if request is None:
            build_parser(()).print_help()
            return 0
        # Imported here: only this option needs it, and every command.
        from equipoise.cli.completion import render_completion

        print(render_completion(request))
        return 0
    finally:
        # Also after `--help`, which leaves by SystemExit: an output that is full is noticed here.
        sys.stdout.flush()
