"""Runs the protocols' tests at full strength, and keeps what was seen.

    python benchmarks/engine_deep.py exploration   20,000 interleavings: ten minutes
    python benchmarks/engine_deep.py faults        the fault matrix on processes: ten minutes
    python benchmarks/engine_deep.py soak          10,000 epochs on each path: a quarter of an hour
    python benchmarks/engine_deep.py ascend        the fault matrix on simulated NPUs: three minutes
    python benchmarks/engine_deep.py channels      40,000 plays of stages' channels: ten minutes
    python benchmarks/engine_deep.py exchanges     5,000 plays of expert exchanges: some minutes

`ascend` is for the environment of tox's `npusim`, which holds torch_npu. Writes
benchmarks/results/engine_{exploration,faults,soak,ascend,channels,exchanges}.json, of which
`python benchmarks/engine_deep_page.py` makes docs/engine-results.md. No figure here is a speed.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

THEIRS = dict(os.environ)
"""The environment of what is run."""
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # this process itself has no driver
from evidence import ROOT, save  # noqa: E402

PYTEST = ("-m", "pytest", "-q", "--timeout", "7200", "-o", "junit_family=xunit1")
"""The newer family of reports has no place for what tests record."""
SUITES = {
    "exploration": (*PYTEST, "tests/exploration/engine/test_exploration.py"),
    "faults": (*PYTEST, "tests/processes/balancer/test_faults.py"),
    "soak": (*PYTEST, "tests/processes/balancer/test_soak.py"),
    "ascend": (*PYTEST, "tests/devices/test_engine.py"),
    "channels": (*PYTEST, "tests/exploration/channel/test_exploration.py"),
    "exchanges": (*PYTEST, "tests/exploration/exchange/test_exploration.py"),
}
"""What each is, for Python."""
SIMULATED = ("-m", "npusim", "--schedule", "lazy", "--")
"""The program of Python over the simulated driver."""
Figures = dict[str, Any]


def command(suite: str) -> list[str]:
    """What is run."""
    program = [sys.executable, *SUITES[suite]]
    return [sys.executable, *SIMULATED, *program] if suite == "ascend" else program


def measured(suite: str) -> Figures:
    """How each test of a suite ended. Raises RuntimeError where nothing was run."""
    own = {"HYPOTHESIS_PROFILE": "deep", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "suite.xml"
        done = subprocess.run(
            [*command(suite), f"--junitxml={out}"], cwd=ROOT, env={**THEIRS, **own}, check=False
        )
        if not out.exists():
            raise RuntimeError(f"{suite}: pytest ended with {done.returncode}")
        found = told(ElementTree.parse(out).getroot())
    words = ["python" if word == sys.executable else word for word in command(suite)]
    shown = f"HYPOTHESIS_PROFILE=deep {shlex.join(words)}"
    return {"command": shown, "exit_code": done.returncode, **found}


def told(root: ElementTree.Element) -> Figures:
    """Tests by how they ended, seconds in all, and what they have recorded."""
    tests = [_test(case) for case in root.iter("testcase")]
    # Hypothesis records its statistics here too; they are not JSON.
    written = {each.attrib["name"]: each.attrib["value"] for each in root.iter("property")}
    recorded = {name: json.loads(text) for name, text in written.items() if text[:1] == "{"}
    seconds = sum(float(case.attrib["time"]) for case in root.iter("testcase"))
    return {"tests": dict(tests), "seconds": round(seconds), "recorded": recorded}


def _test(case: ElementTree.Element) -> tuple[str, str]:
    """Its name and how it ended."""
    ends = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    ended = next((ends[child.tag] for child in case if child.tag in ends), "passed")
    return case.attrib["name"], ended


def main() -> None:
    """Do what the command line says."""
    if len(sys.argv) != 2 or sys.argv[1] not in SUITES:
        sys.exit(f"usage: python benchmarks/engine_deep.py {'|'.join(SUITES)}")
    suite = sys.argv[1]
    figures = measured(suite)
    save(f"engine_{suite}", ["python", "benchmarks/engine_deep.py", suite], figures)
    sys.exit(figures["exit_code"])


if __name__ == "__main__":
    main()
