"""Entry point of the command line: parses arguments, runs a command, returns its exit code."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module

from equipoise.cli.exit_code import run_to_exit_code
from equipoise.cli.parser import build_parser

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

    Exit codes: what the command returns, or those of `run_to_exit_code`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_to_exit_code(lambda: _run(arguments))


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
