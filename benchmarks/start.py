"""What each command takes to start and to do something small: CPU time and memory.

    python benchmarks/start.py
    python benchmarks/start.py --quick     once each; nothing is kept

Every command is a process of its own, with torch installed and without (its import is refused, as
where it is not installed). CPU time is user and system, of the process and its children; memory is
the most that the process had resident, as the kernel counts it. A server is ended by SIGTERM as
soon as it says that it serves. Of runs there is the median, the least and the most; both ways take
turns.

Writes benchmarks/results/start.json; `python benchmarks/report.py` shows it.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from lib.results import Row, save, spread
from report import show

RUNS = 5
PRELUDE = """
import atexit, pathlib, re, sys
def keep():
    text = pathlib.Path("/proc/self/status").read_text()
    pathlib.Path("memory").write_text(re.search(r"VmHWM:\\s+(\\d+) kB", text)[1])
atexit.register(keep)
"""
"""Of the program alone: the kernel's own count at the end has what its parent had, too."""
COMMAND = """
if sys.argv.pop(1) == "without":
    sys.modules["torch"] = None
from equipoise.cli.main import main
sys.exit(main())
"""
IMPORTS = {
    "import equipoise": "import equipoise",
    "import equipoise; equipoise.plan": "import equipoise; equipoise.plan",
    "import torch": "import torch",
}
SHAPE = ("--ranks", "32")
COMMANDS = {
    "--help": ("--help",),
    "plan": ("plan", "counts.npy", *SHAPE, "--slots", "288", "-o", "map.json"),
    "report": ("report", "counts.npy", *SHAPE),
    "convert": ("convert", "counts.npy", "counts.csv", "--quiet"),
    "advise": ("advise", "counts.npy", *SHAPE),
    "replay": ("replay", "counts.npy", *SHAPE, "--engine", "equipoise"),
    "simulate": ("simulate", "--workload", "prop", "--workers", "4", "--requests", "400"),
    "doctor": ("doctor",),
}
WORKER = ("--workers", "http://127.0.0.1:9", "--slots", "1")
SERVERS = {
    "route": (("route", *WORKER, "--port", "0"), "serving on "),
    "policy-server": (("policy-server", "--port", "0", "--metrics-port", "0"), "policy on "),
    "picker": (
        ("picker", *WORKER, "--port", "0", "--health-port", "0", "--metrics-port", "0"),
        "picking on ",
    ),
}
LAYERS, WINDOWS, EXPERTS = 8, 4, 256


def measure(arguments: tuple[str, ...], folder: Path, ready: str = "") -> tuple[float, float]:
    """CPU seconds and MB of a process of Python; one with a line to wait for is then ended."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if ready else subprocess.DEVNULL,
        text=True,
    ) as child:
        try:
            if ready:
                assert child.stderr is not None
                if not any(ready in line for line in child.stderr):
                    raise SystemExit(f"{arguments[2:]} never said {ready!r}")
                child.send_signal(signal.SIGTERM)
            _, _, usage = os.wait4(child.pid, 0)
        finally:
            child.kill()
    kilobytes = int((folder / "memory").read_text())
    return usage.ru_utime + usage.ru_stime, kilobytes * 1024 / 1e6


def subjects() -> dict[str, tuple[tuple[str, ...], str]]:
    """By its words what is started: arguments, with a place for the way; a line to wait for."""
    found = {f"`{words}`": (("-c", PRELUDE + code, "{way}"), "") for words, code in IMPORTS.items()}
    for name, command in COMMANDS.items():
        found[f"`equipoise {name}`"] = (("-c", PRELUDE + COMMAND, "{way}", *command), "")
    for name, (command, ready) in SERVERS.items():
        if find_spec("envoy" if name == "picker" else "aiohttp") is None:
            print(f"{name}: what it needs is not installed", file=sys.stderr)
            continue
        words = f"`equipoise {name}`, ended when it serves"
        found[words] = (("-c", PRELUDE + COMMAND, "{way}", *command), ready)
    return found


def rows(runs: int, folder: Path) -> list[Row]:
    """One for each subject."""
    generator = np.random.default_rng(0)
    np.save(folder / "counts.npy", generator.integers(0, 999, (LAYERS, WINDOWS, EXPERTS)))
    table: list[Row] = []
    for words, (arguments, ready) in subjects().items():
        taken: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
        for _ in range(runs):
            for way, pairs in taken.items():
                if way == "with" or not words.startswith("`import"):
                    filled = tuple(argument.replace("{way}", way) for argument in arguments)
                    pairs.append(measure(filled, folder, ready))
        row: Row = {"words": words}
        for way, pairs in taken.items():
            if pairs:
                row[f"cpu_{way}"] = spread(cpu for cpu, _ in pairs)
                row[f"mb_{way}"] = spread(memory for _, memory in pairs)
        table.append(row)
        print(
            row["words"], *(f"{k} {v[0]:.2f}" for k, v in row.items() if k != "words"), flush=True
        )
    return table


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="CPU time and memory of starting each command.")
    parser.add_argument("--quick", action="store_true", help="once each; nothing is kept")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        table = rows(1 if quick else RUNS, Path(folder))
    if not quick:
        save("start", ["python", "benchmarks/start.py"], {}, {"starts": table})
    show("start", {}, {"starts": table})


if __name__ == "__main__":
    main()
