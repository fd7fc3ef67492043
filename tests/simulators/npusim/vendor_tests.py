"""Runs torch_npu's own tests over the simulated driver, and counts.

    python -m npusim.vendor_tests PATH... [--schedule S]

PATH is a test file of a checkout of torch_npu, or a folder of them. Those tests are not part of
this repository. Each runs in a process of its own: after an operator has failed torch_npu runs
nothing more in that process.
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from npusim.errors import BuildFailed, Refused
from npusim.launch import FAULTY
from npusim.schedule import parse

TESTS = Path(__file__).resolve().parent.parent
LIMIT = 300.0
"""Seconds for one test."""
OUTCOMES = {0: "passed", 1: "failed", 2: "failed", 4: "failed", 5: "skipped", FAULTY: "faults"}
QUIET = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "-W", "ignore", "--tb=short")


@dataclass(frozen=True)
class Result:
    """One test: `passed`, `failed`, `skipped`, `faults` or `hung`, and what it said about it."""

    name: str
    outcome: str
    why: str


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 when all passed or were skipped, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m npusim.vendor_tests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", nargs="+", type=Path)
    parser.add_argument("--schedule", default="lazy", help="as of python -m npusim (default lazy)")
    options = parser.parse_args(arguments)
    try:
        results = list(_run_all(_files(options.path), parse(options.schedule, None)))
    except (Refused, BuildFailed) as error:
        print(f"npusim: {error}", file=sys.stderr)
        return 2
    counts = Counter(result.outcome for result in results)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()) or "no test")
    return 0 if results and set(counts) <= {"passed", "skipped"} else 1


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise Refused(f"no such file: {path}")
        files += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    return [path.resolve() for path in files]


def _run_all(files: Sequence[Path], schedule: str) -> Iterator[Result]:
    for file in files:
        for name in _names(file):
            result = _run(file, name, schedule)
            print(f"{result.outcome:8} {file.name}::{name}  {result.why}", flush=True)
            yield result


def _names(file: Path) -> list[str]:
    """The tests in a file, without the file's name."""
    completed = _pytest("eager", file, str(file), "--collect-only")
    if completed.returncode != 0:
        raise Refused(f"cannot read {file.name}: {_last_error(completed)}")
    return [line.partition("::")[2] for line in completed.stdout.splitlines() if "::" in line]


def _run(file: Path, name: str, schedule: str) -> Result:
    try:
        completed = _pytest(schedule, file, f"{file}::{name}", "-rs")
    except subprocess.TimeoutExpired:
        return Result(name, "hung", f"no end within {LIMIT:.0f} s")
    outcome = OUTCOMES.get(completed.returncode, "died")
    if outcome == "passed" and " skipped" in completed.stdout:
        outcome = "skipped"
    return Result(name, outcome, "" if outcome == "passed" else _last_error(completed))


def _pytest(schedule: str, file: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """pytest over the simulator, in the file's folder."""
    command = [sys.executable, "-m", "pytest", *QUIET, f"--rootdir={file.parent}", *arguments]
    return subprocess.run(
        [sys.executable, "-m", "npusim", "--schedule", schedule, "--", *command],
        cwd=file.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def _last_error(completed: "subprocess.CompletedProcess[str]") -> str:
    """The line that says most: the first fault, else the first error, else the last line."""
    lines = [
        line.strip()
        for line in f"{completed.stderr}\n{completed.stdout}".splitlines()
        if line.strip()
    ]
    for mark in ("npusim fault", "E   ", "SKIPPED", "Error"):
        for line in lines:
            if mark in line:
                return line[:200]
    return lines[-1][:200] if lines else f"exit code {completed.returncode}"


if __name__ == "__main__":
    sys.exit(main())
