"""The race table: six deliberate bugs under each schedule, each beside its right variant.

    python -m npusim.selftest.races
    python -m npusim.selftest.races --schedules lazy

A simulator that says yes to everything would be worth nothing: under the lazy schedule no buggy
round may be correct, and no schedule may spoil a right one. Exit code 1 when that does not hold.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

TESTS = Path(__file__).resolve().parents[2]
ROUNDS = 20
LIMIT = 150.0
"""Seconds for one schedule."""
SINGLE = ("eager", "delay", "lazy", "explore")
PAIRED = ("eager", "delay", "lazy")
"""An exploring schedule is one within a process."""
UNDISTURBED = {"NPUSIM_IDLE_MS": "1000", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""A pause of the machine does not look like idleness, at which a lazy device moves by itself."""
CorrectRounds = dict[str, int]
"""Of ROUNDS rounds, how many were correct, by "case/variant"."""


def measure(schedules: Sequence[str] = SINGLE) -> dict[str, CorrectRounds]:
    """What was found, by schedule. Raises RuntimeError when a program fails or tells a fault."""
    pairs = [name for name in schedules if name in PAIRED]
    with ThreadPoolExecutor(2) as pool:
        single = pool.map(single_process, schedules)
        paired = pool.map(two_processes, pairs)
        by_schedule: dict[str, CorrectRounds] = dict(zip(schedules, single, strict=True))
        for name, of in zip(pairs, paired, strict=True):
            by_schedule[name] |= of
    return by_schedule


def single_process(schedule: str) -> CorrectRounds:
    """The four cases of one process."""
    return _last_object(_start(schedule, "race_cases"))


def two_processes(schedule: str) -> CorrectRounds:
    """The two cases of two processes."""
    with TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [_start(schedule, "race_pair", str(rank), store) for rank in range(2)]
        try:
            _finish(ranks[0])
            return _last_object(ranks[1])
        finally:
            for rank in ranks:  # the other one, too, when one has failed
                rank.kill()
                rank.communicate()


def violations(by_schedule: Mapping[str, CorrectRounds]) -> list[str]:
    """What the table should not say, one line each."""
    return [
        f"{case} under {schedule}: {correct} of {ROUNDS} correct"
        for schedule, of in by_schedule.items()
        for case, correct in of.items()
        if not _expected(schedule, case.rpartition("/")[2], correct)
    ]


def table(by_schedule: Mapping[str, CorrectRounds]) -> str:
    """The table, in Markdown."""
    lines = [
        f"| correct rounds of {ROUNDS} | {' | '.join(by_schedule)} |",
        f"| --- |{' --- |' * len(by_schedule)}",
    ]
    for case in max(by_schedule.values(), key=len):
        cells = [str(of.get(case, "")) for of in by_schedule.values()]
        lines.append(f"| {case.replace('/', ', ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _expected(schedule: str, variant: str, correct: int) -> bool:
    if variant == "right":
        return correct == ROUNDS
    if schedule == "lazy":
        return correct == 0
    return schedule == "eager" or correct < ROUNDS


def _start(schedule: str, module: str, *arguments: str) -> "subprocess.Popen[str]":
    program = [sys.executable, "-m", f"npusim.selftest.{module}", *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "npusim", "--schedule", schedule, "--", *program],
        env={**os.environ, **UNDISTURBED, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: "subprocess.Popen[str]") -> str:
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}:\n{err}")
    return out


def _last_object(process: "subprocess.Popen[str]") -> CorrectRounds:
    rounds: CorrectRounds = json.loads(_finish(process).splitlines()[-1])
    return rounds


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schedules", nargs="+", choices=SINGLE, default=SINGLE, metavar="S", help="these only"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")
    options = parser.parse_args(arguments)
    by_schedule = measure(options.schedules)
    if options.json:
        options.json.write_text(json.dumps(by_schedule, indent=2) + "\n", encoding="utf-8")
    print(table(by_schedule))
    messages = violations(by_schedule)
    for line in messages:
        print(line, file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
