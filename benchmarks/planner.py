"""Planners side by side, in one run: quality, moves, and CPU time as a ratio to greedy.

    python benchmarks/planner.py                    the shapes of 32 to 128 ranks: some minutes
    python benchmarks/planner.py --shapes a e       these only
    python benchmarks/planner.py --quick            one seed, few repeats, for a look

Loads are those of `loads.py`: twelve windows, of which every fourth brings another domain. A plan
is made on one window and judged on it (`plan`), on the next one (`next`, in steady windows and
where the domain switches), on batches of the next one with the plan's shares (`iter`), and on the
same batches with shares solved on their own counts (`exact`). `moved` is copies that their rank did
not hold, as part of all slots. Times are CPU seconds of one thread, medians of interleaved pairs,
as ratios to greedy: the faster of the fixed baseline and the shipped one, whose plans are equal.

Writes benchmarks/results/planner.json; `python benchmarks/performance.py` shows it.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import rules
from baseline.greedy import Baseline
from evidence import save
from loads import Counts, Model, Window, batches, windows

from equipoise import _native
from equipoise.balancer.experts import Plan, plan
from equipoise.balancer.experts.placement import Placement
from equipoise.balancer.experts.planner import Layout, even_shares

WINDOWS, BATCHES = 13, 2
SEEDS, REPEATS = 3, 5
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """How many of everything, and the nodes and groups of the hierarchical rule."""

    layers: int
    experts: int
    slots: int
    ranks: int
    nodes: int
    groups: int

    @property
    def model(self) -> Model:
        """Loads of that shape."""
        return Model(layers=self.layers, experts=self.experts, ranks=self.ranks)


SHAPES = {
    "a": Shape(58, 256, 288, 32, 4, 8),
    "b": Shape(58, 256, 320, 64, 8, 8),
    "c": Shape(94, 128, 160, 32, 4, 8),
    "d": Shape(61, 384, 512, 128, 16, 16),
    "e": Shape(58, 256, 1152, 576, 72, 8),
}


Planner = Callable[[Counts, Layout | None], Layout]


def planners(shape: Shape) -> dict[str, Planner]:
    """By name; each is given the load and what is installed."""
    slots, ranks, experts = shape.slots, shape.ranks, shape.experts

    def even(placement: Placement) -> Layout:
        return Layout(placement, even_shares(placement, experts))

    def rows(rule: Callable[[Counts], Placement], load: Counts) -> Layout:
        return even(np.stack([rule(row) for row in load]))

    def ours(policy: str, load: Counts, installed: Layout | None) -> Layout:
        before = None if installed is None else installed.placement
        found = plan(load, slots=slots, ranks=ranks, installed=before, policy=policy)
        return Layout(found.placement, found.shares)

    def swift(load: Counts, installed: Layout | None) -> Layout:
        if installed is None:
            return even(_native.plan_greedy(load, slots, ranks))
        pairs = zip(load, installed.placement, strict=True)
        return even(np.stack([rules.swift(row, before, ranks) for row, before in pairs]))

    found: dict[str, Planner] = {
        "greedy": lambda load, _: even(_native.plan_greedy(load, slots, ranks)),
        "snake": lambda load, _: rows(lambda row: rules.snake(row, slots, ranks), load),
        "swift-like": swift,
        "connected": lambda load, _: ours("connected", load, None),
        "incremental": lambda load, installed: ours("incremental", load, installed),
    }
    if slots % shape.nodes == 0 and experts % shape.groups == 0 and shape.groups >= shape.nodes:
        found["hierarchical"] = lambda load, _: rows(
            lambda row: rules.hierarchical(row, slots, ranks, shape.nodes, shape.groups), load
        )
    return found


def imbalance(load: Counts, layout: Layout, ranks: int) -> Floats:
    """(layers,): max/mean - 1."""
    rows = np.take_along_axis(load, layout.placement.astype(np.int64), axis=1) * layout.shares
    full = rows.reshape(load.shape[0], ranks, -1).sum(axis=2)
    found: Floats = full.max(axis=1) / full.mean(axis=1) - 1.0
    return found


def exact(batch: Counts, layout: Layout, ranks: int) -> float:
    """The same with shares solved on the batch itself."""
    found = plan(batch, slots=layout.placement.shape[1], ranks=ranks,
                 installed=layout.placement, max_copies=0)  # fmt: skip
    return found.predicted_imbalance


def judge(shape: Shape, name: str, loads: Sequence[Window], seed: int) -> list[dict[str, float]]:
    """One row for each rebalance after the first."""
    planner, installed, found = planners(shape)[name], None, []
    for number in range(WINDOWS - 1):
        window, after = loads[number], loads[number + 1]
        proposed = planner(window.load, installed)
        if installed is not None:
            told = list(batches(shape.model, after.odds, seed * 100 + number, BATCHES))
            moved = _native.count_moves(installed.placement, proposed.placement, shape.ranks)
            found.append({
                "switched": float(window.switched),
                "ends": float(after.switched),
                "moved": moved / proposed.placement.size,
                "plan": float(imbalance(window.load, proposed, shape.ranks).mean()),
                "worst": float(imbalance(window.load, proposed, shape.ranks).max()),
                "next": float(imbalance(after.load, proposed, shape.ranks).mean()),
                "iter": float(np.mean([imbalance(b, proposed, shape.ranks) for b in told])),
                "exact": float(np.mean([exact(b, proposed, shape.ranks) for b in told])),
            })  # fmt: skip
        installed = proposed
    return found


def summary(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means, of steady rebalances and of those on the first window of a domain."""

    def mean(key: str, chosen: Callable[[dict[str, float]], bool]) -> float:
        return statistics.fmean(row[key] for row in rows if chosen(row))

    def steady(row: dict[str, float]) -> bool:
        return not row["switched"]

    def stays(row: dict[str, float]) -> bool:
        return not row["ends"]

    return {
        "plan": mean("plan", lambda _: True),
        "worst": max(row["worst"] for row in rows),
        "next": mean("next", lambda row: stays(row) and steady(row)),
        "next_after_switch": mean("next", lambda row: bool(row["switched"])),
        "next_at_switch": mean("next", lambda row: bool(row["ends"])),
        "iter": mean("iter", stays),
        "exact": mean("exact", stays),
        "moved_steady": mean("moved", steady),
        "moved_switch": mean("moved", lambda row: bool(row["switched"])),
        "plan_switch": mean("plan", lambda row: bool(row["switched"])),
    }


def cpu(call: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def times(shape: Shape, loads: Sequence[Window], repeats: int) -> dict[str, Any]:
    """CPU time as ratios to greedy's, interleaved with it, and greedy's own in milliseconds."""
    baseline, ranks, slots = Baseline(), shape.ranks, shape.slots
    first = loads[0].load
    shipped = _native.plan_greedy(first, slots, ranks)
    if not np.array_equal(baseline.plan(first, slots, ranks), shipped):
        raise RuntimeError("the shipped greedy plans otherwise than the baseline")
    ratios: dict[str, list[float]] = {"connected": [], "steady": [], "switch": []}
    greedy: list[float] = []
    for kind, call in _calls(shape, loads):
        for _ in range(repeats):
            fixed = cpu(lambda: baseline.plan(first, slots, ranks))
            own = cpu(lambda: _native.plan_greedy(first, slots, ranks))
            greedy.append(min(fixed, own))
            ratios[kind].append(cpu(call) / greedy[-1])
    return {
        "greedy_milliseconds": statistics.median(greedy) * 1e3,
        **{
            kind: {
                "ratio": statistics.median(found),
                "lowest": min(found),
                "highest": max(found),
            }
            for kind, found in ratios.items()
        },
    }


def _calls(shape: Shape, loads: Sequence[Window]) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is timed: one connected plan, and every rebalance of an incremental run."""
    group = {"slots": shape.slots, "ranks": shape.ranks}
    yield "connected", lambda: plan(loads[0].load, policy="connected", **group)  # type: ignore[arg-type]
    installed: Plan = plan(loads[0].load, policy="connected", **group)  # type: ignore[arg-type]
    for window in loads[1:-1]:
        kept = installed.placement

        def call(load: Counts = window.load, before: Placement = kept) -> Plan:
            return plan(load, installed=before, **group)  # type: ignore[arg-type]

        yield ("switch" if window.switched else "steady"), call
        installed = call()


def measure(name: str, seeds: int, repeats: int) -> dict[str, Any]:
    """One shape."""
    shape = SHAPES[name]
    rows: dict[str, list[dict[str, float]]] = {}
    for seed in range(seeds):
        loads = list(windows(shape.model, seed, WINDOWS))
        for algorithm in planners(shape):
            rows.setdefault(algorithm, []).extend(judge(shape, algorithm, loads, seed))
            sys.stderr.write(f"{name}, seed {seed}: {algorithm}\n")
    return {
        "shape": vars(shape),
        "seeds": seeds,
        "times": times(shape, list(windows(shape.model, 0, WINDOWS)), repeats),
        "algorithms": {algorithm: summary(found) for algorithm, found in rows.items()},
    }


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["a", "b", "c", "d"])
    parser.add_argument("--quick", action="store_true", help="one seed, few repeats, not kept")
    chosen = parser.parse_args()
    seeds, repeats = (1, 3) if chosen.quick else (SEEDS, REPEATS)
    figures = {name: measure(name, seeds, repeats) for name in chosen.shapes}
    for name, found in figures.items():
        show(name, found)
    if not chosen.quick:
        save("planner", ["python", "benchmarks/planner.py", "--shapes", *chosen.shapes], figures)


def show(name: str, found: dict[str, Any]) -> None:
    """A table for the terminal."""
    keys = list(next(iter(found["algorithms"].values())))
    print(f"\n{name}: {found['shape']}")
    print(f"{'':14}" + "".join(f"{key:>18}" for key in keys))
    for algorithm, row in found["algorithms"].items():
        print(f"{algorithm:14}" + "".join(f"{row[key]:18.4f}" for key in keys))
    for kind, told in found["times"].items():
        print(f"{kind}: {told if isinstance(told, float) else dict(told)}")


if __name__ == "__main__":
    main()
