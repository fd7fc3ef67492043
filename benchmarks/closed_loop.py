"""The loop of an operator on the shipped model, and its figures: python benchmarks/closed_loop.py

Each of the shipped texts is cut in two. The first halves are Monday's traffic, which is recorded
and planned for; the second halves are Tuesday's, of which the plan has seen nothing. English, whose
kind of text was not recorded at all, stands for a day that nobody expected.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from evidence import save

KINDS = "python", "chinese", "tables"
UNSEEN = "english"
PLACED = "--placement", "placement.json"
BY_SUM = "--placement", "by-sum.json"
"""Planned without a look at what is busy together, for comparison."""
WARY = "--sigma", "1"
Figures = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A command as a user types it, and what it prints."""

    name: str
    command: str
    output: str


def half(text: bytes, day: int) -> bytes:
    """The first (0) or second (1) half of a UTF-8 text, cut between characters."""
    middle = len(text) // 2
    while text[middle] & 0xC0 == 0x80:
        middle += 1
    return (text[:middle], text[middle:])[day]


def lay_out(folder: Path) -> None:
    """The texts of both days, and of the one that nobody expected."""
    shipped = files("equipoise.demo").joinpath("text")
    for day, name in enumerate(("monday", "tuesday")):
        (folder / name).mkdir()
        for kind in KINDS:
            text = shipped.joinpath(f"{kind}.txt").read_bytes()
            (folder / name / f"{kind}.txt").write_bytes(half(text, day))
    (folder / f"{UNSEEN}.txt").write_bytes(shipped.joinpath(f"{UNSEEN}.txt").read_bytes())


def texts(day: str) -> list[str]:
    """The option that names a day's traffic."""
    return ["--text", *(f"{day}/{kind}.txt" for kind in KINDS)]


def call(folder: Path, name: str, *arguments: str) -> Call:
    """Run a command there; whatever it fails with ends the benchmark."""
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", *arguments],
        cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=600,
    )  # fmt: skip
    command = " ".join(["equipoise", *arguments])
    print(f"$ {command}\n{done.stdout}", flush=True)
    return Call(name, command, done.stdout.rstrip("\n"))


def loop(folder: Path) -> list[Call]:
    """Record, report, plan, serve, report again, and plan from there."""
    record = "record", *texts("monday"), "--ranks", "4", "-o", "recorded"
    plan = "plan", "recorded", "--ranks", "4", "--slots", "40", *WARY, "-o", PLACED[1]
    serve = "run", *PLACED, *texts("tuesday"), "--out", "tuesday-run"
    again = "report", "tuesday.npz", *PLACED, "--json", "tuesday.json", "--html", "tuesday.html"
    onward = "plan", "tuesday.npz", "--installed", PLACED[1], *WARY, "-o", "next.json"
    return [
        call(folder, "record", *record),
        call(folder, "report", "report", "recorded"),
        call(folder, "plan", *plan),
        call(folder, "run", *serve),
        call(folder, "attach", "record", "--run", "tuesday-run", "-o", "tuesday.npz"),
        call(folder, "again", *again),
        call(folder, "onward", *onward),
    ]


def others(folder: Path) -> None:
    """The same placement on Monday's own traffic, and on a kind of text that was not recorded.

    And on all of them what a plan for the sum of Monday would bring.
    """
    call(folder, "run", "run", *PLACED, *texts("monday"), "--out", "monday-run")
    call(folder, "run", "run", *PLACED, "--text", f"{UNSEEN}.txt", "--out", f"{UNSEEN}-run")
    for name in ("monday", UNSEEN):
        call(folder, "attach", "record", "--run", f"{name}-run", "-o", f"{name}.npz")
        call(folder, "again", "report", f"{name}.npz", *PLACED, "--json", f"{name}.json")
    call(folder, "plan", "plan", "recorded", "--ranks", "4", "--slots", "40", "-o", BY_SUM[1])
    for name in TRAFFIC:
        call(folder, "again", "report", f"{name}.npz", *BY_SUM, "--json", f"{name}-by-sum.json")


def measured(folder: Path, name: str) -> Figures:
    """What the placement brought on one traffic: as reported of its counts, and as served."""
    served = json.loads((folder / f"{name}-run" / "summary.json").read_text())
    return {
        "imbalance_unbalanced": served["imbalance_unbalanced"],
        "imbalance_by_sum": reported(folder / f"{name}-by-sum.json"),
        "imbalance_reported": reported(folder / f"{name}.json"),
        "imbalance_served": served["imbalance_placement"],
        "noise_floor": served["noise_floor"],
        "outputs_identical": served["outputs_identical"],
    }


def reported(file: Path) -> float:
    """Of the placement, by rank."""
    served = json.loads(file.read_text())["served"]
    found: float = served["placement"]["by_rank"]["average"]["imbalance"]
    return found


def table(figures: Figures) -> list[str]:
    """Before and after, in Markdown."""
    lines = [
        "| traffic | before | planned for the sum, as reported | with `--sigma 1`, as reported "
        "| as served | times smaller | noise floor | outputs identical |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, words in TRAFFIC.items():
        found = figures[name]
        before, after = found["imbalance_unbalanced"], found["imbalance_served"]
        lines.append(
            f"| {words} | {before:.4f} | {found['imbalance_by_sum']:.4f} "
            f"| {found['imbalance_reported']:.4f} | {after:.4f} "
            f"| {before / after:.1f} | {found['noise_floor']:.4f} "
            f"| {'yes' if found['outputs_identical'] else 'no'} |"
        )
    return lines


TRAFFIC = {
    "monday": "Monday's: recorded, planned for",
    "tuesday": "Tuesday's: the same kinds, other text",
    UNSEEN: "English: a kind that was not recorded",
}


def main() -> int:
    """Run the loop, keep its figures, print before and after."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lay_out(folder)
        calls = loop(folder)
        others(folder)
        figures: Figures = {traffic: measured(folder, traffic) for traffic in TRAFFIC}
    save(
        "closed_loop",
        ["python", "benchmarks/closed_loop.py"],
        figures | {"calls": [asdict(one) for one in calls]},
    )
    print("\n".join(table(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
