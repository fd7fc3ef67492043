"""The argument parser of the command line: its commands, and which module has each."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from equipoise import __version__
from equipoise.cli.command import Command, Parser

DESCRIPTION = "Keeps Mixture-of-Experts serving in balance on any accelerator."
EXAMPLES = """\
examples:
  equipoise run                             # four ranks, shipped texts, a report
  equipoise plan recorded/ --ranks 32 --slots 288 -o placement.json
  equipoise COMMAND --help                  # what a command does, and its options"""
COMMANDS = {
    "run": "serve real text on several ranks, balanced, and report",
    "record": "count what every expert took",
    "conformance": "does a backend keep the contract, clause by clause?",
    "plan": "place experts by what was recorded",
    "report": "how evenly recorded rows spread",
    "advise": "is balancing worth it, and with what",
    "replay": "what each balancer would gain on recorded routing",
    "convert": "statistics and placements from format to format",
    "route": "a proxy that balances requests over servers",
    "route-report": "where requests went, from the proxy's log",
    "picker": "which worker a request goes to, for Envoy",
    "policy-server": "one policy for several proxies or pickers",
    "bench serve": "how fast a server answers",
    "simulate": "which router of requests, by evidence",
    "doctor": "what this machine has, what is missing and why",
}
"""What each does. A command is in the module of its first word, with underscores for hyphens."""
OPTION_MODULES = ("run", "conformance")
"""Commands whose options are in a module of their own, without torch."""


def load_command(name: str) -> Command:
    """A command by its name; nothing of the others is imported."""
    place = name.split()[0].replace("-", "_") + ("_options" if name in OPTION_MODULES else "")
    command = import_module(f"equipoise.cli.{place}").COMMAND
    assert isinstance(command, Command)
    return command


def build_parser(loaded: Iterable[str] = COMMANDS) -> Parser:
    """Every command that exists; only those that are `loaded` have their options.

    Parsing raises UsageError for bad input; the result has `command`, which is None without one.
    """
    parser = Parser(prog="equipoise", description=DESCRIPTION, epilog=EXAMPLES)
    parser.usage = "%(prog)s COMMAND [options]"
    parser.add_argument("--version", action="version", version=f"equipoise {__version__}")
    parser.add_argument(
        "--print-completion",
        metavar="SHELL",
        dest="shell",
        help="print what completes commands and options in bash, zsh, fish or tcsh",
    )
    # Not required: without any, help is shown, and an unknown option is named before.
    commands = parser.add_subparsers(
        title="commands", prog=parser.prog, dest="command", metavar="COMMAND", parser_class=Parser
    )
    for name, about in COMMANDS.items():
        first, _, second = name.partition(" ")
        entry = commands.add_parser(first, help=about)
        if second:
            entry.usage, entry.description = f"%(prog)s {second} [options]", about
            subjects = entry.add_subparsers(
                prog=entry.prog, dest="subject", metavar="SUBJECT", required=True
            )
            entry = subjects.add_parser(second, help=about)
        if name in loaded or first in loaded:
            load_command(name).fill(entry)
    parser.set_defaults(command=None)
    return parser


def read_request(words: Iterable[str]) -> tuple[Command | None, Any]:
    """The command that is asked for, with its settings; None without one. Raises UsageError."""
    words = list(words)
    parser = build_parser(words[:1])
    parser.refuse_unknown(words[:1])  # before what follows it is taken for a command
    options = vars(parser.parse_args(words))
    name = next((name for name in COMMANDS if name.split()[0] == options["command"]), None)
    if name is None:
        return None, options.get("shell")
    command = load_command(name)
    return command, command.read(options)
