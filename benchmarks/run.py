"""The main job of the README, and the loop of an operator on the shipped model.

    python benchmarks/run.py                  `equipoise run` with its defaults, its picture
    python benchmarks/run.py --closed-loop    record, report, plan, serve, report again
    python benchmarks/run.py --quick          either of them in small; nothing is kept

In the closed loop each of three shipped texts is cut in two. The first halves are Monday's traffic,
which is recorded and planned for; the second halves are Tuesday's, of which the plan has seen
nothing. English, whose kind of text was not recorded at all, stands for a day that nobody expected.

Writes benchmarks/results/{main_job,closed_loop}.json; `python benchmarks/report.py` shows them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from lib.results import ROOT, Row, save
from report import CLOSED_LOOP, show

from equipoise.demo.run_record import load_record
from equipoise.report.run.plots import rank_heat_map
from equipoise.report.svg import standalone_svg

PICTURE = ROOT / "docs" / "images" / "before-after.svg"
VARIANTS = {
    "unbalanced": "no balancing: 32 slots",
    "static": "32 + 8 slots, `static` shares",
    "lagged": "32 + 8 slots, `lagged` shares",
    "local": "32 + 8 slots, `local` shares (default)",
    "exact": "32 + 8 slots, `exact` shares",
}
KINDS, UNSEEN = ("python", "chinese", "tables"), "english"
TRAFFIC = {
    "monday": "Monday's: recorded, planned for",
    "tuesday": "Tuesday's: the same kinds, other text",
    UNSEEN: "English: a kind that was not recorded",
}
PLACEMENT_OPTION = "--placement", "placement.json"
BY_SUM = "--placement", "by-sum.json"
"""Planned without a look at what is busy together, for comparison."""
WARY = "--sigma", "1"
SMALL = "--steps", "24"
"""Options of `equipoise run` and `record` with `--quick`."""
Figures = dict[str, Any]


def main_job(quick: bool) -> int:
    """Run `equipoise run` with its defaults; exit as it does."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        began = time.perf_counter()
        run = ["equipoise", "run", "--out", folder, "--json", str(out), *(SMALL if quick else ())]
        code = subprocess.run([sys.executable, "-m", *run], check=False).returncode
        seconds = time.perf_counter() - began
        if not out.exists():
            return code
        if not quick:
            picture = rank_heat_map(load_record(Path(folder) / "record.npz"))
            PICTURE.write_text(standalone_svg(picture.svg))
        summary = {"wall_seconds": round(seconds, 1), **json.loads(out.read_text())}
    figures, tables = main_job_figures(summary)
    show("main_job", figures, tables)
    if quick:  # too few steps for two rebalances in each phase
        return int(not summary["outputs_identical"])
    save("main_job", ["equipoise", "run"], figures, tables)
    return code


def main_job_figures(summary: Figures) -> tuple[Row, dict[str, list[Row]]]:
    """What is kept of a run."""
    before, after = summary["imbalance_unbalanced"], summary["imbalance_balanced"]
    phases = summary["rebalances_per_phase"]
    figures = {
        "times_smaller": {"value": before / after, "note": f"{before:.4f} to {after:.4f}"},
        **{name: summary[name] for name in ("imbalance_static", "imbalance_lagged", "noise_floor")},
        "rebalances": {
            "value": summary["rebalances"],
            "note": f"{phases} by phase",
            "met": min(phases, default=0) >= 1,
        },
        "copies": {
            "value": summary["copies"],
            "note": f"of {summary['slots_total']} slots",
        },
        "outputs": {
            "value": "yes" if summary["outputs_identical"] else "no",
            "met": summary["outputs_identical"],
        },
        **{
            name: summary[name] for name in ("wall_seconds", "stall_seconds", "stall_noise_seconds")
        },
    }
    reference_outputs = summary["reference_outputs"]
    rows: list[Row] = [
        {
            "words": words,
            "imbalance": f"{variant['imbalance']:.4f}",
            "smaller": before / variant["imbalance"],
            "outputs": "identical" if variant["outputs"] == reference_outputs else "differ",
        }
        for name, words in VARIANTS.items()
        for variant in [summary["variants"][name]]
    ]
    floor = f"*{summary['noise_floor']:.4f}*"
    rows.append({"words": "*noise floor of a perfect placement*", "imbalance": floor})
    return figures, {"variants": rows}


def cut(text: bytes, day: int) -> bytes:
    """The first (0) or second (1) half of a UTF-8 text, cut between characters."""
    middle = len(text) // 2
    while text[middle] & 0xC0 == 0x80:
        middle += 1
    return (text[:middle], text[middle:])[day]


def write_texts(folder: Path) -> None:
    """The texts of both days, and of the one that nobody expected."""
    shipped = files("equipoise.demo").joinpath("text")
    for day, name in enumerate(("monday", "tuesday")):
        (folder / name).mkdir()
        for kind in KINDS:
            text = shipped.joinpath(f"{kind}.txt").read_bytes()
            (folder / name / f"{kind}.txt").write_bytes(cut(text, day))
    (folder / f"{UNSEEN}.txt").write_bytes(shipped.joinpath(f"{UNSEEN}.txt").read_bytes())


def texts(day: str) -> list[str]:
    """The option that names a day's traffic."""
    return ["--text", *(f"{day}/{kind}.txt" for kind in KINDS)]


def call(folder: Path, *arguments: str) -> None:
    """Run a command there and print what it prints; its failure ends the benchmark."""
    result = subprocess.run(
        [sys.executable, "-m", "equipoise", *arguments],
        cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=600,
    )  # fmt: skip
    print(f"$ {' '.join(['equipoise', *arguments])}\n{result.stdout}", flush=True)


def closed_loop(quick: bool) -> int:
    """Record, report, plan, serve, report again, and plan from there; keep before and after."""
    small = SMALL if quick else ()
    slots = "--ranks", "4", "--slots", "40"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder)
        call(folder, "record", *texts("monday"), "--ranks", "4", "-o", "recorded", *small)
        call(folder, "report", "recorded")
        call(folder, "plan", "recorded", *slots, *WARY, "-o", PLACEMENT_OPTION[1])
        call(folder, "plan", "recorded", *slots, "--sigma", "0", "-o", BY_SUM[1])
        for day in TRAFFIC:
            text_options = ["--text", f"{UNSEEN}.txt"] if day == UNSEEN else texts(day)
            call(folder, "run", *PLACEMENT_OPTION, *text_options, "--out", f"{day}-run", *small)
            call(folder, "record", "--run", f"{day}-run", "-o", f"{day}.npz")
            call(folder, "report", f"{day}.npz", *PLACEMENT_OPTION, "--json", f"{day}.json")
            call(folder, "report", f"{day}.npz", *BY_SUM, "--json", f"{day}-by-sum.json")
        onward = "plan", "tuesday.npz", "--installed", PLACEMENT_OPTION[1], *WARY, "-o", "next.json"
        call(folder, *onward)
        by_day = {day: day_figures(folder, day) for day in TRAFFIC}
    tables = {"traffic": closed_loop_rows(by_day)}
    sys.stdout.write("\n".join(CLOSED_LOOP.lines({"figures": {}, "tables": tables})) + "\n")
    if not quick:
        save("closed_loop", ["python", "benchmarks/run.py", "--closed-loop"], {}, tables)
    return 0


def day_figures(folder: Path, day: str) -> Figures:
    """What the placement brought on one traffic: as reported of its counts, and as served."""
    summary = json.loads((folder / f"{day}-run" / "summary.json").read_text())
    return {
        "imbalance_unbalanced": summary["imbalance_unbalanced"],
        "imbalance_by_sum": reported_imbalance(folder / f"{day}-by-sum.json"),
        "imbalance_reported": reported_imbalance(folder / f"{day}.json"),
        "imbalance_served": summary["imbalance_placement"],
        "noise_floor": summary["noise_floor"],
        "outputs_identical": summary["outputs_identical"],
    }


def reported_imbalance(file: Path) -> float:
    """Imbalance of the placement, by rank."""
    imbalance: float = json.loads(file.read_text())["served"]["placement"]["by_rank"]["average"][
        "imbalance"
    ]
    return imbalance


def closed_loop_rows(by_day: Figures) -> list[Row]:
    """Before and after, by traffic."""
    return [
        {
            "words": words,
            "before": each["imbalance_unbalanced"],
            "by_sum": each["imbalance_by_sum"],
            "reported": each["imbalance_reported"],
            "served": each["imbalance_served"],
            "smaller": each["imbalance_unbalanced"] / each["imbalance_served"],
            "floor": each["noise_floor"],
            "outputs": "yes" if each["outputs_identical"] else "no",
        }
        for day, words in TRAFFIC.items()
        for each in [by_day[day]]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--closed-loop", action="store_true", help="the loop of an operator")
    parser.add_argument("--quick", action="store_true", help="few steps; nothing is kept")
    options = parser.parse_args(arguments)
    return closed_loop(options.quick) if options.closed_loop else main_job(options.quick)


if __name__ == "__main__":
    sys.exit(main())
