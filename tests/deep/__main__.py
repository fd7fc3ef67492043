"""Everything that is too long for a commit, part by part: `tox -e deep`.

    tox -e deep                           all parts, for hours
    tox -e deep -- exploration types      these
    tox -e deep -- --list                 what each proves, and how long it takes
    tox -e deep -- --trial processes      with the numbers of a commit, to try; nothing is kept
    tox -e deep -- unit -- -k planner     options of pytest behind a second `--`; nothing is kept
    tox -e deep -- --pages                write the pages anew from the results

A part that fails or hangs does not stop the others. Results are kept in tests/deep/results.json,
and shown in docs/deep-results.md and docs/conformance-matrix.md, with commit and date; a part that
is run alone replaces its own rows only. A part that cannot be run here is skipped, with a line that
says why; one that was asked for by name fails. The exit code is 1 where anything failed.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from deep import matrix_page, page
from deep.parts import PARTS, REPORT, Part, Report, Step, chosen
from deep.results import Results, Row, from_junit, load, merged, restricted, save
from deep.running import TIMED_OUT, run_bounded
from helpers.paths import ROOT, SEARCH_PATH

from equipoise.machine import describe_machine

INTERRUPTED = 130
PACKAGES = ("torch", "numpy", "hypothesis", "triton", "torch_npu", "vllm", "vllm_ascend")
"""Packages whose versions a result shows."""
VERSIONS = """
import platform
from importlib.metadata import PackageNotFoundError, version
found = ["Python " + platform.python_version()]
for name in {names!r}:
    try:
        found.append(name + " " + version(name))
    except PackageNotFoundError:
        pass
print(", ".join(found))
"""
NOT_RESULTS = (".", ":!docs", ":!*.md", ":!tests/deep/results.json", ":!benchmarks/results")


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        parts: to be run.
        named: whether they were asked for by name.
        trial: with the numbers of a commit.
        options: for pytest.
    """

    parts: Sequence[Part]
    named: bool
    trial: bool
    options: Sequence[str]

    @property
    def kept(self) -> bool:
        """Whether results are."""
        return not (self.trial or self.options)


class Runner:
    """Runs parts one after the other, and keeps what they show.

    Args:
        request: which, and how.
        results: what is known from earlier runs.
    """

    def __init__(self, request: Request, results: Results) -> None:
        self.results = results
        self._request = request
        self._failed: list[str] = []

    def run(self) -> int:
        """Run all; 1 where anything failed, else 0."""
        for part in self._request.parts:
            self._part(part)
        for line in self._failed:
            print(f"deep: FAILED {line}", flush=True)
        return 1 if self._failed else 0

    def _part(self, part: Part) -> None:
        if reason := part.lacks():
            if self._request.named:
                self._failed.append(f"{part.name}: {reason}")
            print(f"  {part.name}: SKIP ({reason})", flush=True)
            return
        steps = part.steps()
        if self._request.options:
            steps = [step for step in steps if step.report is Report.JUNIT]
        for step in steps:
            row = self._step(part, step)
            if row["outcome"] != "passed":
                self._failed.append(f"{part.name}, {step.name}: {_why(row)}")
            if self._request.kept and not step.prepares:
                self.results = merged(self.results, part.name, row)
                keep(self.results)
            if step.prepares and row["outcome"] != "passed":
                return
        if self._request.kept:
            names = [step.name for step in steps if not step.prepares]
            self.results = restricted(self.results, part.name, names)
            keep(self.results)

    def _step(self, part: Part, step: Step) -> Row:
        options = self._request.options
        shown = " ".join([step.shown, *map(shlex.quote, options)])
        print(f"\n== {part.name}, {step.name}\n$ {shown}", flush=True)
        environment = environment_of(step, "ci" if self._request.trial else "deep")
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            command = [str(report) if word == REPORT else word for word in step.command]
            ended = run_bounded([*command, *options], step.limit, environment, ROOT)
            told, outcome = _told(step.report, report, ended.code)
        row: Row = {
            "step": step.name,
            "command": shown,
            "commit": commit(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "outcome": outcome,
            "seconds": round(ended.seconds),
            "cpu_seconds": round(ended.cpu_seconds),
            "machine": machine(),
            "versions": versions(step, environment),
            **told,
        }
        print(f"-- {outcome}, {ended.seconds:.0f} s, {ended.cpu_seconds:.0f} CPU s", flush=True)
        return row


def _told(kind: Report, report: Path, code: int) -> tuple[Row, str]:
    """What a report says, and how the step ended."""
    outcome = {0: "passed", TIMED_OUT: "timed out"}.get(code, f"exit code {code}")
    if kind is Report.NONE:
        return {}, outcome
    if not report.exists():
        return {}, "no report" if code == 0 else outcome
    if kind is Report.TABLES:
        return {"tables": json.loads(report.read_text("utf-8"))}, outcome
    return from_junit(report), outcome


def _why(row: Row) -> str:
    failing = row.get("failing", [])
    return "\n    ".join([f"{row['outcome']} ({row['command']})", *failing])


def environment_of(step: Step, profile: str) -> dict[str, str]:
    """Variables of a step: those of this process, how hard to look, and its own."""
    found: dict[str, str | None] = {
        **os.environ,
        "HYPOTHESIS_PROFILE": profile,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": SEARCH_PATH,
        **step.environment,
    }
    return {name: value for name, value in found.items() if value is not None}


def keep(results: Results) -> None:
    """Write results and pages."""
    save(results)
    write_pages(results)


def write_pages(results: Results) -> None:
    """Write the pages of these results."""
    page.FILE.write_text(page.text(results), "utf-8")
    matrix_page.FILE.write_text(matrix_page.text(results), "utf-8")
    matrix_page.GUIDE.write_text(matrix_page.guide(results), "utf-8")


def commit() -> str:
    """Short name of the commit, with `+` where other files than results and documents differ."""
    name = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *NOT_RESULTS)
    return name + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def machine() -> str:
    """Processor, cores and memory."""
    found = describe_machine()
    return f"{found['processor']}, {found['cores']} cores, {found['memory']}"


def versions(step: Step, environment: dict[str, str]) -> str:
    """Versions in the interpreter of a step."""
    done = subprocess.run(
        [step.python, "-c", VERSIONS.format(names=PACKAGES)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.stdout.strip() or f"Python {platform.python_version()}"


def listing() -> str:
    """Parts, as `--list` prints them."""
    return "\n".join(f"{part.name:12} {part.proves}; {part.takes}" for part in PARTS)


def make_parser() -> argparse.ArgumentParser:
    """The options before `--`."""
    parser = argparse.ArgumentParser(
        prog="tox -e deep --",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [--list | --pages | [--trial] [PART ...] [-- OPTION OF PYTEST ...]]",
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; all")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="what each part proves, and its time")
    what.add_argument("--pages", action="store_true", help="write the pages anew from the results")
    what.add_argument("--trial", action="store_true", help="with the numbers of a commit")
    return parser


def read_request(words: Sequence[str]) -> Request | None:
    """What to run; None where something was printed or written instead.

    Raises:
        SystemExit: 2 for a part or an option that there is not, 0 for `--help`.
    """
    at = list(words).index("--") if "--" in words else len(words)
    own, options = words[:at], words[at + 1 :]
    parser = make_parser()
    arguments = parser.parse_args(own)
    if (arguments.list or arguments.pages) and (arguments.parts or options):
        parser.error("--list and --pages stand alone")
    if (arguments.trial or options) and not arguments.parts:
        parser.error("name the parts to try, or to give options to")
    try:
        parts = chosen(arguments.parts)
    except ValueError as error:
        parser.error(str(error))
    if options and (silent := [part.name for part in parts if not part.runs_pytest]):
        parser.error(f"pytest does not run {', '.join(silent)}: no options for it")
    if arguments.list:
        print(listing())
    elif arguments.pages:
        write_pages(load())
    else:
        return Request(parts, bool(arguments.parts), arguments.trial, options)
    return None


def _interrupt(number: int, _: object) -> None:
    """Ends as Ctrl-C does, so that no process is left."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(words: Sequence[str]) -> int:
    """The command; its exit code."""
    request = read_request(words)
    if request is None:
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return Runner(request, load()).run()
    except KeyboardInterrupt:
        print("deep: interrupted; the step that ran is not kept", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
