"""Conformance, the engine's fault matrix and channel programs on an NVIDIA device.

    python benchmarks/gpu_suites.py                      all three
    python benchmarks/gpu_suites.py conformance faults   these; of the others what was seen stays

Writes benchmarks/results/gpu_suites.json; `python benchmarks/report.py` shows it. No figure
here is a speed. Ends with 2 where there is no device, and with 1 where something failed.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu.stopwatch import facts, open_device, why_unavailable
from lib.results import ROOT, commit, load, save

from equipoise.hal import registry

BACKEND = "cuda"
NO_DEVICE = 2
CONFORMANCE = ("-m", "equipoise", "conformance", "--backend", BACKEND, "--quiet", "--ranks")
RANKS = 4
"""Of the largest group that is tested, where there are so many devices."""
PYTEST = (
    *("-m", "pytest", "-q", "-m", "", "-k", "cuda and not cudasim"),
    *("--timeout", "7200", "-o", "junit_family=xunit1"),
)
"""The tests that need a GPU, deep ones among them."""
TESTS = {
    "faults": "tests/devices/test_engine_faults.py",
    "channels": "tests/devices/test_pipeline_channel.py",
}
ENDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}
Figures = dict[str, Any]


def conformance(folder: Path) -> Figures:
    """How many clauses were seen to hold, or not."""
    out = folder / "conformance.json"
    command = (*CONFORMANCE, str(min(RANKS, registry.accelerator(BACKEND).devices())))
    code = run((*command, "--json", str(out)))
    if not out.exists():
        raise RuntimeError(f"conformance ended with {code}, and told nothing")
    report = json.loads(out.read_text())
    counts = Counter(clause["status"] for clause in report["clauses"].values())
    return {
        "command": shlex.join(("python", *command)),
        "ended": dict(counts),
        "violated": [name for name, c in report["clauses"].items() if c["status"] == "violated"],
        "seconds": report["seconds"],
        "exit_code": code,
    }


def suite(name: str, folder: Path) -> Figures:
    """How the tests of a file ended, and why some were skipped."""
    if not (ROOT / TESTS[name]).exists():
        raise RuntimeError(f"{name}: there is no {TESTS[name]}")
    out = folder / f"{name}.xml"
    command = (*PYTEST, TESTS[name])
    code = run((*command, f"--junitxml={out}"))
    if not out.exists():
        raise RuntimeError(f"{name}: pytest ended with {code}, and told nothing")
    command_text = f"HYPOTHESIS_PROFILE=deep {shlex.join(('python', *command))}"
    return {
        "command": command_text,
        "exit_code": code,
        **outcome_counts(ElementTree.parse(out).getroot()),
    }


def outcome_counts(root: ElementTree.Element) -> Figures:
    """Tests by how they ended; the names of those that failed, and reasons of skips."""
    counts: Counter[str] = Counter()
    failures, reasons, seconds = [], set(), 0.0
    for case in root.iter("testcase"):
        seconds += float(case.attrib["time"])
        parts = [child for child in case if child.tag in ENDS]
        how = ENDS[parts[0].tag] if parts else "passed"
        counts[how] += 1
        if how == "failed":
            failures.append(case.attrib["name"])
        elif how == "skipped":
            reasons.add(parts[0].attrib.get("message", "no reason"))
    return {
        "ended": dict(counts),
        "failed": failures,
        "reasons": sorted(reasons),
        "seconds": round(seconds),
    }


def run(command: Sequence[str]) -> int:
    """A program of Python, in the tree; its exit code."""
    own = {
        "HYPOTHESIS_PROFILE": "deep",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "tests")),
    }
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, **own}, check=False
    )
    return result.returncode


SUITES: dict[str, Callable[[Path], Figures]] = {
    "conformance": conformance,
    "faults": lambda folder: suite("faults", folder),
    "channels": lambda folder: suite("channels", folder),
}


def figure(suite_figures: Figures) -> Figures:
    """What a suite came to, and whether that is enough; None where nothing was tested."""
    ended = ", ".join(f"{count} {how}" for how, count in suite_figures["ended"].items())
    why = "".join(f"; {reason}" for reason in suite_figures.get("reasons", ()))
    seconds = f"{suite_figures['seconds']:.0f}"
    has_failed = suite_figures["exit_code"] != 0 or bool(
        suite_figures.get("failed") or suite_figures.get("violated")
    )
    tested = bool(set(suite_figures["ended"]) - {"skipped"})
    text = (
        f"{ended or 'nothing'}, in {seconds} s{why}; "
        f"`{suite_figures['command']}` at {suite_figures['commit']}"
    )
    return {"value": text, "met": False if has_failed else (True if tested else None)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, and keep what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    names = parser.parse_args(arguments).suites or list(SUITES)
    if strange := sorted(set(names) - set(SUITES)):
        parser.error(f"unknown: {', '.join(strange)}; known: {', '.join(SUITES)}")
    if why := why_unavailable(BACKEND):
        sys.stderr.write(f"gpu_suites.py cannot run here: {why}\n")
        return NO_DEVICE
    with open_device(BACKEND) as place:
        device = facts(place)
    by_suite: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            by_suite[name] = {**SUITES[name](Path(folder)), "commit": commit()}
    before = (load("gpu_suites") or {"figures": {}})["figures"]
    figures = {
        **before,
        **{name: figure(each) for name, each in by_suite.items()},
        "device": device,
    }
    save("gpu_suites", ["python", "benchmarks/gpu_suites.py", *names], figures, {"suites": [
        {"suite": name, **each} for name, each in by_suite.items()
    ]})  # fmt: skip
    return int(any(each["exit_code"] for each in by_suite.values()))


if __name__ == "__main__":
    sys.exit(main())
