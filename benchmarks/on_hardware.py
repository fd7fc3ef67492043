"""One command for whoever has the hardware: runs everything and packs what came out.

    python benchmarks/on_hardware.py --backend ascend
    python benchmarks/on_hardware.py --backend ascend --ranks 8 --out report.tar.gz

Runs `equipoise doctor`, the conformance suite on one device and on several, the main job, and the
benchmarks that exist for the backend, one after the other; a step that fails or takes too long is
recorded and does not stop the rest. The archive holds the output, exit code and time of each step,
its JSON and HTML, and the versions of everything, so that a report says what it was seen on. It
holds no environment variable but those named in `TOLD`, no host name and no path of the machine
beyond what a step prints itself.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
EQUIPOISE = (sys.executable, "-m", "equipoise")
PACKAGES = ("equipoise", "torch", "torch_npu", "triton", "triton-ascend", "numpy", "hypothesis")
TOLD = ("ASCEND_HOME_PATH", "HCCL_BUFFSIZE", "P2P_HCCL_BUFFSIZE", "TASK_QUEUE_ENABLE")
TOOLS = (("npu-smi", "info"), ("nvidia-smi",), ("lscpu",), ("uname", "-srm"))
LIMIT = 1800.0
"""Seconds that one step may take."""
PATIENCE = 30.0
"""Seconds that a tool may take to say what the machine is."""


@dataclass(frozen=True)
class Step:
    """A command whose outcome is worth having. Its files are named after it."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a step; an exit code of -1 means that it took longer than the limit."""

    name: str
    command: str
    exit_code: int
    seconds: float


def steps(backend: str, ranks: int, folder: Path) -> list[Step]:
    """What is run, in this order."""

    def told(name: str, *command: str) -> Step:
        files = ("--json", str(folder / f"{name}.json"), "--html", str(folder / f"{name}.html"))
        return Step(name, (*EQUIPOISE, *command, *files))

    conformance = ("conformance", "--backend", backend, "--quiet")
    run = ("run", "--backend", backend, "--quiet")
    extra = HERE / f"{backend}.py"  # the backend's own benchmark, where there is one
    return [
        Step("doctor", (*EQUIPOISE, "doctor")),
        told("conformance-1", *conformance, "--ranks", "1"),
        told(f"conformance-{ranks}", *conformance, "--ranks", str(ranks)),
        told("run-2", *run, "--ranks", "2"),
        told(f"run-{ranks}", *run, "--ranks", str(ranks)),
        *([Step("benchmark", (sys.executable, str(extra)))] if extra.exists() else []),
    ]


def perform(step: Step, folder: Path, limit: float) -> Outcome:
    """Run it; everything that it prints goes to a file of its name."""
    began = time.monotonic()
    with (folder / f"{step.name}.txt").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(step.command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = -1
    seconds = round(time.monotonic() - began, 1)
    return Outcome(step.name, shlex.join(step.command[1:]), code, seconds)


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(tools: Iterable[Sequence[str]] = TOOLS) -> dict[str, str]:
    """What the tools that exist here print about it."""
    said = {}
    for tool in tools:
        try:
            done = subprocess.run(
                tool, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said[tool[0]] = f"{type(error).__name__}"
            continue
        said[tool[0]] = done.stdout
    return said


def pack(folder: Path, out: Path) -> None:
    """Everything in the folder, without owners."""

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(out, "w:gz") as archive:
        archive.add(folder, arcname="equipoise-report", filter=anonymous)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="ascend", help="accelerator backend (ascend)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the larger runs (4)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds a step may take (1800)")
    parser.add_argument("--out", type=Path, default=Path("equipoise-report.tar.gz"), help="archive")
    parser.add_argument("--only", nargs="*", default=[], metavar="STEP", help="these steps only")
    chosen = parser.parse_args(arguments)
    if not 2 <= chosen.ranks <= 64:
        parser.error(f"--ranks is 2 to 64, not {chosen.ranks}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 0 when every step ended with 0, else 1."""
    chosen = options(arguments)
    outcomes = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for step in steps(chosen.backend, chosen.ranks, folder):
            if chosen.only and step.name not in chosen.only:
                continue
            print(f"{step.name} ...", end=" ", flush=True)
            outcomes.append(perform(step, folder, chosen.limit))
            print(f"exit code {outcomes[-1].exit_code}, {outcomes[-1].seconds:g} s", flush=True)
        report = {
            "backend": chosen.backend,
            "ranks": chosen.ranks,
            "versions": versions(),
            "environment": {name: os.environ[name] for name in TOLD if name in os.environ},
            "machine": machine(),
            "steps": [asdict(outcome) for outcome in outcomes],
        }
        (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        pack(folder, chosen.out)
    print(f"packed into {chosen.out}")
    return int(any(outcome.exit_code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
