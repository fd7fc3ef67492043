"""Planners side by side, in one run: quality, moves, and CPU time as a ratio to greedy.

    python benchmarks/planner.py                    all shapes, 32 to 576 ranks: some minutes
    python benchmarks/planner.py --shapes a e       these only
    python benchmarks/planner.py --quick            one seed, few repeats, for a look
    python benchmarks/planner.py --statistics day1.pt day2.pt --ranks 32 --slots 288
                                                    loads that somebody recorded

Loads are those of `loads.py`: twelve windows, of which every fourth brings another domain. A plan
is made on one window and judged on it (`plan`), on the next one (`next`, in steady windows and
where the domain switches), on batches of the next one with the plan's shares (`iter`), and on the
same batches with shares solved on their own counts (`exact`). `moved` is copies that their rank did
not hold, as part of all slots. Times are CPU seconds of one thread, medians of interleaved pairs,
as ratios to greedy: the faster of the fixed baseline and the shipped one, whose plans are equal.
Beside it: how far shares are from the optimum of the linear program, and what moves when a load is
planned on twice.

Writes benchmarks/results/planner.json; `python benchmarks/performance.py` shows it.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from contestants import Planner, left_out, planners
from evidence import ROOT, save, write
from given import shape_of, trial_of
from loads import Counts
from shapes import SHAPES, Shape, Trial, synthetic
from stopwatch import times

from equipoise import _native
from equipoise.balancer.experts import Plan, plan
from equipoise.balancer.experts.layout import Layout
from equipoise.balancer.experts.placement import SHARE_ONE
from equipoise.hal.errors import FormatError, PlacementError

sys.path.insert(0, str(ROOT / "tests"))
SEEDS, REPEATS = 3, 5
PROVED = 3
"""Rebalances of a trial whose shares are held to the linear program."""
TARGET = 0.02
Floats = npt.NDArray[np.float64]
Row = dict[str, float]
SERIES = ("plan", "next", "exact", "moved")
"""What is kept window by window."""


def imbalance(load: Counts, layout: Layout, ranks: int) -> Floats:
    """(layers,): max/mean - 1; 0 of a layer without load."""
    rows = np.take_along_axis(load, layout.placement.astype(np.int64), axis=1) * layout.shares
    full = rows.reshape(load.shape[0], ranks, -1).sum(axis=2)
    mean = full.mean(axis=1)
    found: Floats = np.where(mean > 0, full.max(axis=1) / np.where(mean > 0, mean, 1.0) - 1.0, 0.0)
    return found


def levelled(load: Counts, layout: Layout, ranks: int) -> Layout:
    """The same placement with shares solved on that load."""
    held = layout.placement
    found = plan(load, slots=held.shape[1], ranks=ranks, installed=held, max_copies=0)
    return Layout(found.placement, found.shares)


def judge(planner: Planner, trial: Trial, ranks: int) -> list[Row]:
    """One row for each plan; the first one finds nothing installed, and `moved` says 1."""
    installed, found = None, []
    for number in range(len(trial.loads) - 1):
        load, after, told = trial.loads[number], trial.loads[number + 1], trial.told[number + 1]
        proposed = planner(load, installed)
        held = None if installed is None else installed.placement
        moved = proposed.placement.size
        if held is not None:
            moved = _native.count_moves(held, proposed.placement, ranks)
        planned = imbalance(load, proposed, ranks)
        exact = [imbalance(b, levelled(b, proposed, ranks), ranks).mean() for b in told]
        found.append({
            "switched": float(trial.switched[number]),
            "ends": float(trial.switched[number + 1]),
            "moved": moved / proposed.placement.size,
            "plan": float(planned.mean()),
            "worst": float(planned.max()),
            "next": float(imbalance(after, proposed, ranks).mean()),
            "iter": float(np.mean([imbalance(b, proposed, ranks) for b in told])),
            "exact": float(np.mean(exact)),
        })  # fmt: skip
        installed = proposed
    return found


def summary(rows: Sequence[Row]) -> Row:
    """Means, of steady rebalances and of those on the first window of a domain, where there are."""

    def steady(row: Row) -> bool:
        return not row["switched"]

    def stays(row: Row) -> bool:
        return not row["ends"]

    chosen: dict[str, tuple[str, Callable[[Row], bool]]] = {
        "plan": ("plan", lambda _: True),
        "next": ("next", lambda row: stays(row) and steady(row)),
        "next_after_switch": ("next", lambda row: bool(row["switched"])),
        "next_at_switch": ("next", lambda row: bool(row["ends"])),
        "next_stays": ("next", stays),
        "iter": ("iter", stays),
        "exact": ("exact", stays),
        "moved_steady": ("moved", steady),
        "moved_switch": ("moved", lambda row: bool(row["switched"])),
        "plan_switch": ("plan", lambda row: bool(row["switched"])),
    }
    found = {
        "worst": max(row["worst"] for row in rows),
        "plan_highest": max(row["plan"] for row in rows),
    }
    for name, (key, which) in chosen.items():
        values = [row[key] for row in rows if which(row)]
        if values:
            found[name] = statistics.fmean(values)
    return found


def chain(shape: Shape, trial: Trial) -> Iterator[tuple[Counts, Plan]]:
    """Loads and the plans of an incremental run on them."""
    installed = None
    for load in trial.loads[:-1]:
        found = plan(load, slots=shape.slots, ranks=shape.ranks, installed=installed)
        yield load, found
        installed = found.placement


def unchanged(shape: Shape, trials: Sequence[Trial]) -> dict[str, int]:
    """What moves when the same load is planned on again, where the target holds and where not."""
    found = {"plans": 0, "held": 0, "moved_held": 0, "moved": 0}
    for trial in trials:
        for load, made in chain(shape, trial):
            again = plan(load, slots=shape.slots, ranks=shape.ranks, installed=made.placement)
            held = made.predicted_imbalance <= TARGET
            found["plans"] += 1
            found["held"] += held
            found["moved_held"] = max(found["moved_held"], again.moves if held else 0)
            found["moved"] = max(found["moved"], again.moves)
    return found


def gaps(shape: Shape, trial: Trial) -> dict[str, float]:
    """By how much shares miss the optimum that HiGHS finds: the largest over layers."""
    from helpers.references.linear_program import optima

    def gap(load: Counts, layout: Layout) -> float:
        missed = imbalance(load, layout, shape.ranks) - optima(load, layout.placement, shape.ranks)
        return float(missed.max())

    found = {"connected": 0.0, "connected, batches": 0.0, "incremental": 0.0}
    plans = list(chain(shape, trial))
    for number in np.unique(np.linspace(0, len(plans) - 1, PROVED).astype(int)):
        load, kept = plans[number]
        new = plan(load, slots=shape.slots, ranks=shape.ranks, policy="connected")
        layout, batch = Layout(new.placement, new.shares), trial.told[number + 1][0]
        own = levelled(batch, layout, shape.ranks)
        later = Layout(kept.placement, kept.shares)
        told = zip(found, ((load, layout), (batch, own), (load, later)), strict=True)
        for name, (rows, shared) in told:
            found[name] = max(found[name], gap(rows, shared))
    return found


def step(shape: Shape, trial: Trial) -> float:
    """What the least change of a share is worth on a rank, the most over layers, in means.

    Shares are whole numbers of 1 / 65536: nobody can come nearer to an optimum than about that.
    """
    parts = [load.max(axis=1) / np.maximum(load.sum(axis=1), 1) for load in trial.loads]
    return float(np.max(parts)) * shape.ranks / SHARE_ONE


def series(runs: Sequence[Sequence[Row]]) -> dict[str, list[float]]:
    """Plan by plan, the mean over seeds."""
    return {
        key: [statistics.fmean(row[key] for row in rows) for rows in zip(*runs, strict=True)]
        for key in SERIES
    }


def measure(name: str, shape: Shape, trials: Sequence[Trial], repeats: int) -> dict[str, Any]:
    """One shape."""
    runs: dict[str, list[list[Row]]] = {}
    for algorithm, planner in planners(shape).items():
        sys.stderr.write(f"{name}: {algorithm}\n")
        runs[algorithm] = [judge(planner, trial, shape.ranks) for trial in trials]
    sys.stderr.write(f"{name}: times, linear programs\n")
    # Of the first plan nothing moves that was installed: it is in no mean.
    later = {
        key: [row for rows in found for row in rows[1:] or rows] for key, found in runs.items()
    }
    return {
        "shape": vars(shape),
        "seeds": len(trials),
        "times": times(shape, trials[0], repeats),
        "gaps": gaps(shape, trials[0]),
        "step": step(shape, trials[0]),
        "unchanged": unchanged(shape, trials),
        "left_out": left_out(shape),
        "switches": [n for n, switched in enumerate(trials[0].switched) if switched],
        "series": {algorithm: series(found) for algorithm, found in runs.items()},
        "algorithms": {algorithm: summary(rows) for algorithm, rows in later.items()},
    }


def main() -> None:
    """Do what the command line says."""
    chosen = arguments()
    seeds, repeats = (1, 3) if chosen.quick else (SEEDS, REPEATS)
    if chosen.statistics:
        figures = {"recorded": recorded(chosen, repeats)}
    else:
        figures = {
            name: measure(name, shape, [synthetic(shape, seed) for seed in range(seeds)], repeats)
            for name, shape in SHAPES.items()
            if name in chosen.shapes
        }
    for name, found in figures.items():
        show(name, found)
    command = ["python", "benchmarks/planner.py", *sys.argv[1:]]
    if chosen.json:
        write(chosen.json, command, figures)
    elif not chosen.quick and not chosen.statistics:
        save("planner", command, figures)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="of the generator")
    add("--quick", action="store_true", help="one seed, few repeats, not kept")
    add("--statistics", nargs="+", type=Path, metavar="FILE", help="recorded, instead")
    add("--ranks", type=int, default=32, help="that recorded loads are planned for (32)")
    add("--slots", type=int, help="likewise, of a layer (a slot a rank more than experts)")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args()


def recorded(chosen: argparse.Namespace, repeats: int) -> dict[str, Any]:
    """The same on statistics; what cannot be read or planned ends the run, in one line."""
    try:
        trial = trial_of(chosen.statistics)
        return measure("recorded", shape_of(trial, chosen.ranks, chosen.slots), [trial], repeats)
    except (FormatError, PlacementError) as error:
        sys.stderr.write(f"planner.py: {error}\n")
        raise SystemExit(2) from None


def show(name: str, found: dict[str, Any]) -> None:
    """Tables for the terminal: a row for each figure, a column for each planner."""
    rows = found["algorithms"]
    print(f"\n{name}: {', '.join(f'{count} {what}' for what, count in found['shape'].items())}")
    print(f"{'':18}" + "".join(f"{algorithm:>13}" for algorithm in rows))
    for key in next(iter(rows.values())):
        print(f"{key:18}" + "".join(f"{row[key]:13.4f}" for row in rows.values()))
    print(f"{'over greedy':18}{'median':>13}{'lowest':>13}{'highest':>13}{'ms':>13}")
    for kind, told in found["times"].items():
        if kind != "greedy_milliseconds":
            ratios = "".join(f"{told[key]:13.2f}" for key in ("ratio", "lowest", "highest"))
            print(f"{kind:18}{ratios}{told['seconds'] * 1e3:13.3f}")
    print(f"{'greedy':18}{'':39}{found['times']['greedy_milliseconds']:13.3f}")
    gaps = ", ".join(f"{of} {gap:.5f}" for of, gap in found["gaps"].items())
    print(f"above the linear program's optimum: {gaps}; a step of shares is {found['step']:.5f}")
    same = found["unchanged"]
    print(
        f"copies moved on the same load: {same['moved']} at most, {same['moved_held']} where the "
        f"target held ({same['held']} of {same['plans']} plans)"
    )
    for algorithm, why in found["left_out"].items():
        print(f"left out: {algorithm}, {why}")


if __name__ == "__main__":
    main()
