"""Command: run COMMAND over the simulated driver.

    python -m npusim --schedule lazy -- python -m pytest -m npusim tests/backends

torch_npu in COMMAND and in all its children finds the simulated libraries as it would find those
of an installed CANN. A fault (what no correct program causes) is printed when it happens and again
at the end, and makes the exit code 70 whatever COMMAND said.
"""

import argparse
import sys
from collections.abc import Sequence

from npusim.errors import BuildFailed, Refused
from npusim.launch import FAULTY, Settings, launch
from npusim.schedule import parse

INTERRUPTED = 130
LIMITS = {"devices": 64, "memory": 1 << 20}
"""The most of each: devices, and MiB of each device."""
SCHEDULES = """
schedules:
  eager         a task runs as soon as it can
  delay[:SEED]  every task waits for a random time of up to 2 ms first
  lazy          a stream runs only when somebody asks for what is on it, or after a pause
  explore[:SEED] one scheduler in each process picks which stream moves next, by the seed; the
                same seed gives the same order

exit codes: COMMAND's own (128 + N when signal N ended it); 2 when COMMAND could not be started;
70 when there was a fault, or the file that keeps them is lost; 130 when the build was interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    own_arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--" in own_arguments:
        separator = own_arguments.index("--")
        own_arguments, command = own_arguments[:separator], own_arguments[separator + 1 :]
    else:
        command = []
    try:
        options = _parser().parse_args(own_arguments)
        settings = _settings(options, command)
        code, faulty = launch(command, settings)
    except (Refused, BuildFailed) as error:
        print(f"npusim: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while it builds; later the command gets it
        print("npusim: interrupted", file=sys.stderr)
        return INTERRUPTED
    return FAULTY if faulty and not options.keep_going else code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise Refused(f"{message}; see --help")


def _parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = _Parser(
        prog="python -m npusim",
        usage="python -m npusim --schedule SCHEDULE [options] -- COMMAND...",
        description=f"{description}\n\n{epilog}",
        epilog=SCHEDULES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--schedule", required=True, help="eager, delay, lazy or explore")
    parser.add_argument("--seed", type=int, metavar="N", help="of delay and explore (default 0)")
    parser.add_argument("--devices", type=int, metavar="N", help="simulated devices (default 8)")
    parser.add_argument("--memory", type=int, metavar="MIB", help="of each device (default 4096)")
    parser.add_argument(
        "--keep-going", action="store_true", help="print faults, and end with COMMAND's exit code"
    )
    parser.add_argument(
        "--trace", action="store_true", help="print every call and every task on standard error"
    )
    return parser


def _settings(options: argparse.Namespace, command: Sequence[str]) -> Settings:
    if not command:
        raise Refused("no command: python -m npusim --schedule lazy -- COMMAND...")
    for name, most in LIMITS.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            raise Refused(f"--{name} {value} is not in 1 to {most}")
    schedule = parse(options.schedule, options.seed)
    return Settings(schedule, options.devices, options.memory, options.trace)


if __name__ == "__main__":
    sys.exit(main())
