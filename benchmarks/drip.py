"""How much an incremental plan should move for the sake of what comes next.

    python benchmarks/drip.py             a minute
    python benchmarks/drip.py --quick     one seed, for a look; nothing is kept

Few copies moved leave hot experts less split than a plan made anew has them, and the next window
pays. Two ways to move more of them: a lower *hysteresis*, which says how much hotter, by load per
copy, an expert must be than the one whose copy it takes; or a *drip*, so many copies a layer and
call that change hands for a tenth, where the target is missed. Both are constants of
`balancer/experts/planning.py`. Windows of the generator and of the shipped model's recorded
routing; greedy, which plans anew, beside them.

Writes benchmarks/results/drip.json; `python benchmarks/performance.py` shows it.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from evidence import save
from loads import Counts, Model, batches, windows
from planner import imbalance
from recorded import Recording, recordings

from equipoise import _native
from equipoise.balancer.experts import plan, planning
from equipoise.balancer.experts.layout import Layout, even_shares

WINDOW, PHASE, SEEDS, GENERATED = 8, 40, 5, 2
HYSTERESES = 0.4, 0.8, 1.2, 1.6
DRIPS = 1, 2, 4


@dataclass(frozen=True)
class Window:
    """What is planned on, (layers, experts), batches of it, and whether the traffic is new."""

    load: Counts
    batches: Sequence[Counts]
    switched: bool


@dataclass(frozen=True)
class Way:
    """Of planning incrementally."""

    hysteresis: float
    drip: int


WAYS = {
    "greedy": None,
    **{f"hysteresis {h:g}, drip 0": Way(h, 0) for h in HYSTERESES},
    **{f"hysteresis {planning.HYSTERESIS:g}, drip {d}": Way(planning.HYSTERESIS, d) for d in DRIPS},
}


def generated(model: Model, seed: int) -> Iterator[Window]:
    """Three domains."""
    for number, window in enumerate(windows(model, seed, 13)):
        drawn = list(batches(model, window.odds, seed * 100 + number, 1))
        yield Window(window.load, drawn, window.switched)


def recorded(found: Recording) -> Iterator[Window]:
    """Three kinds of text."""
    rows = found.rows()
    for first in range(0, len(rows), WINDOW):
        cut = rows[first : first + WINDOW]
        yield Window(cut.sum(axis=0), list(cut), first in found.switches)


def follow(seen: Sequence[Window], ranks: int, slots: int, way: Way | None) -> list[dict[str, Any]]:
    """One row for each rebalance after the first."""
    installed: Layout | None = None
    rows = []
    for window, after in pairwise(seen):
        proposed = _planned(window.load, ranks, slots, installed, way)
        if installed is not None:
            moved = _native.count_moves(installed.placement, proposed.placement, ranks)
            rows.append({
                "switched": window.switched,
                "ends": after.switched,
                "moved": moved / proposed.placement.size,
                "plan": imbalance(window.load, proposed, ranks).mean(),
                "next": imbalance(after.load, proposed, ranks).mean(),
                "iter": np.mean([imbalance(b, proposed, ranks).mean() for b in after.batches]),
            })  # fmt: skip
        installed = proposed
    return rows


def _planned(
    load: Counts, ranks: int, slots: int, installed: Layout | None, way: Way | None
) -> Layout:
    if way is None:
        placement = _native.plan_greedy(load, slots, ranks)
        return Layout(placement, even_shares(placement, load.shape[1]))
    planning.HYSTERESIS, planning.DRIP = way.hysteresis, way.drip
    before = None if installed is None else installed.placement
    found = plan(load, slots=slots, ranks=ranks, installed=before)
    return Layout(found.placement, found.shares)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means: of moves by whether the traffic is new, of the next window where it goes on."""

    def mean(key: str, chosen: Sequence[dict[str, Any]]) -> float:
        return float(np.mean([row[key] for row in chosen]))

    stays = [row for row in rows if not row["ends"]]
    return {
        "moved_steady": mean("moved", [row for row in rows if not row["switched"]]),
        "moved_switch": mean("moved", [row for row in rows if row["switched"]]),
        "plan": mean("plan", rows),
        "next": mean("next", stays),
        "iter": mean("iter", stays),
    }


def measure(name: str, runs: Sequence[Sequence[Window]], ranks: int, slots: int) -> dict[str, Any]:
    """Every way on the same windows."""
    ways = {
        way: summary([row for seen in runs for row in follow(seen, ranks, slots, told)])
        for way, told in WAYS.items()
    }
    print(f"{name}, {ranks} ranks, {slots} slots")
    for way, row in ways.items():
        print(f"  {way:24}", " ".join(f"{key} {value:.4f}" for key, value in row.items()))
    return {"name": name, "ranks": ranks, "slots": slots, "ways": ways}


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, not kept")
    chosen = parser.parse_args()
    few, many = (1, 1) if chosen.quick else (GENERATED, SEEDS)
    rows = []
    for ranks, slots in ((32, 288), (64, 320)):
        drawn = [list(generated(Model(ranks=ranks), seed)) for seed in range(few)]
        rows.append(measure("generated", drawn, ranks, slots))
    passes = [list(recorded(found)) for found in recordings(range(many), 3 * PHASE)]
    for ranks, slots in ((4, 40), (8, 48)):
        rows.append(measure("recorded", passes, ranks, slots))
    if not chosen.quick:
        save("drip", ["python", "benchmarks/drip.py"], {"rows": rows})


if __name__ == "__main__":
    main()
