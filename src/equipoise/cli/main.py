"""From arguments to an exit code."""

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence

from equipoise.cli.parser import build_parser
from equipoise.hal.errors import EquipoiseError, UsageError

BAD_INPUT = 2
FAILED = 3
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors on purpose become one line on standard error.

    Exit codes: what the command returns, 2 bad input, 3 another error on purpose, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Before torch is imported: its sockets warn of host names that nobody here needs.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        return _dispatch(
            build_parser().parse_args(arguments), shlex.join(["equipoise", *arguments])
        )
    except UsageError as error:
        return _fail(error, BAD_INPUT)
    except EquipoiseError as error:
        return _fail(error, FAILED)
    except KeyboardInterrupt:
        print("equipoise: interrupted", file=sys.stderr)
        return INTERRUPTED


def _dispatch(arguments: Namespace, command: str) -> int:
    # Imported here: torch and numpy take a second that `--help` need not wait for.
    if arguments.command == "doctor":
        from equipoise.cli.doctor import doctor

        return doctor(arguments)
    from equipoise.cli.run import run

    return run(arguments, command)


def _fail(error: EquipoiseError, code: int) -> int:
    line = " ".join(str(error).split()) or type(error).__name__
    shown = "".join(letter if letter.isprintable() else "?" for letter in line)
    print(f"equipoise: error: {shown}", file=sys.stderr)
    return code
