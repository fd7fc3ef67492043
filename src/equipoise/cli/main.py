"""Entry point of the command line: parses arguments, runs a command, returns its exit code."""

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from errno import ENOSPC
from importlib import import_module

from equipoise.cli import import_errors, process
from equipoise.cli.parser import build_parser
from equipoise.cli.process import TerminatedBySignal, raise_on_signal
from equipoise.hal.errors import EquipoiseError, UsageError

EXIT_STDOUT_CLOSED = 1
EXIT_BAD_INPUT = 2
EXIT_FAILED = 3
EXIT_INTERRUPTED = 130
COMMANDS_WITH_ARGV = (
    "plan",
    "report",
    "advise",
    "replay",
    "convert",
    "bench",
    "simulate",
    "route-report",
)
"""Commands that write their own command line into their outputs; each is a function in a module of
its name, with an underscore for a hyphen."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors on purpose become one line on standard error.

    Exit codes: what the command returns, 1 if standard output was closed, 2 bad input,
    3 another error on purpose or of the system, 130 interrupted,
    128 + n terminated by signal n.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Before torch is imported: its sockets warn of host names that are not needed here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Extensions of torch load when a backend asks for them: one that does not find its driver
    # would end every command here, `doctor` first.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    process.open_missing_streams()
    try:
        with raise_on_signal():
            return _run(arguments)
    except UsageError as error:
        return _fail(error, EXIT_BAD_INPUT)
    except EquipoiseError as error:
        return _fail(error, EXIT_FAILED)
    except BrokenPipeError:
        process.redirect_broken_streams()
        return EXIT_STDOUT_CLOSED
    except OSError as error:
        # Files are written by functions that name them: a full disk without a name is a stream's,
        # which holds nothing any more where it is not buffered.
        full = error.errno == ENOSPC and error.filename is None
        if process.redirect_broken_streams() or full:
            return _fail(EquipoiseError(f"standard output: {error.strerror or error}"), EXIT_FAILED)
        return _fail(error, EXIT_FAILED)
    except ImportError as error:
        if import_errors.failing_package(error) is None:
            raise  # a bug of this program: the traceback is needed to fix it
        process.print_stderr(f"error: {import_errors.explain_import_error(error)}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        process.print_stderr("interrupted")
        return EXIT_INTERRUPTED
    except TerminatedBySignal as termination:
        process.print_stderr(f"terminated by {termination}")
        return termination.exit_code


def _run(arguments: Sequence[str]) -> int:
    parser = build_parser()
    try:
        options = parser.parse_args(arguments)
        if options.command is None:
            parser.print_help()
            return 0
        return _dispatch(options, shlex.join(["equipoise", *arguments]))
    finally:
        # Also after `--help`, which leaves by SystemExit: an output that is full is noticed here.
        sys.stdout.flush()


def _dispatch(arguments: Namespace, command: str) -> int:
    # Imported here: torch and numpy take a second that `--help` need not wait for.
    if arguments.command == "doctor":
        from equipoise.cli.doctor import doctor

        return doctor(arguments)
    if arguments.command == "conformance":
        from equipoise.cli.conformance import conformance

        return conformance(arguments, command)
    if arguments.command in COMMANDS_WITH_ARGV:
        name = arguments.command.replace("-", "_")
        return int(getattr(import_module(f"equipoise.cli.{name}"), name)(arguments, command))
    if arguments.command == "record":
        from equipoise.cli.record import record

        return record(arguments)
    if arguments.command == "route":
        from equipoise.cli.route import route

        return route(arguments)
    if arguments.command == "picker":
        from equipoise.cli.picker import picker

        return picker(arguments)
    if arguments.command == "policy-server":
        from equipoise.cli.policy_server import policy_server

        return policy_server(arguments)
    from equipoise.cli.run import run

    return run(arguments, command)


def _fail(error: Exception, code: int) -> int:
    line = " ".join(str(error).split()) or type(error).__name__
    printable = "".join(letter if letter.isprintable() else "?" for letter in line)
    process.print_stderr(f"error: {printable}")
    return code
