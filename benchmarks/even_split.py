"""Engines that split an expert evenly among its copies: balance against copies moved.

    python benchmarks/even_split.py

The shape that vllm-ascend's policies are compared on, with the loads and start layouts of
`tests/helpers/references/ascend_layouts.py`. max/mean is that of the ranks, mean over layers, on the load
planned on; moves are slots whose expert was not on their rank. `drop-in` is the function that the
engine calls; beside it greedy's plan, its ranks and slots named so that the fewest move, and the
swift-like rule. For Zipf 0.8 plans for many targets, mean over seeds: with an even split, and with
shares for engines that know them. Last, new plans where nothing is installed.

Writes benchmarks/results/even_split.json; `python benchmarks/performance.py` shows it.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import rules
from evidence import ROOT, save
from planner import imbalance
from shapes import SHAPES
from stopwatch import cpu

sys.path.insert(0, str(ROOT / "tests"))
from helpers.references import ascend_layouts as layouts

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.layout import Layout, even_shares
from equipoise.compat import deepseek, vllm_ascend

SEEDS = 5
TARGETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)
SIGMA = 1.05
"""Of the logarithm of an expert's load where nothing is installed."""
Ints = layouts.Ints
Figures = dict[str, Any]
Start = Callable[[np.random.Generator], tuple[Ints, Ints]]


def _mixed(rng: np.random.Generator) -> tuple[Ints, Ints]:
    table = layouts.mixed_layout(rng)
    return layouts.log_normal(rng, 0.05), table


STARTS: dict[str, Start] = {
    "first layout, log-normal 0.02": lambda rng: (
        layouts.log_normal(rng, 0.02),
        layouts.first_layout(),
    ),
    "mixed layout, log-normal 0.05": _mixed,
    "first layout, Zipf 0.8": lambda rng: (layouts.zipf(rng, 0.8), layouts.first_layout()),
}
ZIPF = "first layout, Zipf 0.8"


def drop_in(load: Ints, table: Ints) -> Ints:
    """What the engine would call."""
    new = vllm_ascend.rebalance_experts(table, layouts.workload(load, table))[2]
    return np.array(new, dtype=np.int64)


def greedy(load: Ints, table: Ints) -> Ints:
    """The published rule, labelled so that the fewest copies move."""
    new = vllm_ascend.rebalance_experts(table, layouts.workload(load, table), policy="greedy")[2]
    return np.array(new, dtype=np.int64)


def swift(load: Ints, table: Ints) -> Ints:
    """The swift-like rule of `rules.py`."""
    pairs = zip(load, _flat(table), strict=True)
    return np.stack([rules.swift(row, held, layouts.RANKS) for row, held in pairs]).reshape(
        table.shape
    )


POLICIES = {"drop-in": drop_in, "swift-like": swift, "greedy": greedy}


def judged(load: Ints, before: Ints, after: Ints) -> dict[str, float]:
    """What a table is worth, and what it took."""
    scores = layouts.score(load, after)
    return {
        "before": float(layouts.score(load, before).mean()),
        "after": float(scores.mean()),
        "worst": float(scores.max()),
        "moves": layouts.moves(before, after),
    }


def starts() -> Figures:
    """By start and policy, one row for each seed; and CPU seconds of the drop-in."""
    found: Figures = {}
    for name, start in STARTS.items():
        drawn = [start(np.random.default_rng(seed)) for seed in range(SEEDS)]
        found[name] = {
            policy: [judged(load, table, call(load, table)) for load, table in drawn]
            for policy, call in POLICIES.items()
        }
        load, table = drawn[0]
        found[name]["seconds"] = cpu(lambda load=load, table=table: drop_in(load, table))  # type: ignore[misc]
        sys.stderr.write(f"{name}\n")
    return found


def later() -> Figures:
    """The drop-in again on the same load, and after a fifth of the experts traded their loads."""
    rng = np.random.default_rng(0)
    load, table = STARTS[ZIPF](rng)
    kept = drop_in(load, table)
    changed = load.copy()
    for row in changed:
        some = rng.choice(layouts.EXPERTS, layouts.EXPERTS // 5, replace=False)
        row[some] = row[rng.permutation(some)]
    return {
        "the same again": judged(load, kept, drop_in(load, kept)),
        "then a fifth of the experts trade loads": judged(changed, kept, drop_in(changed, kept)),
    }


def curve() -> Figures:
    """By split, a point for each target: mean imbalance and moves over seeds."""
    drawn = [STARTS[ZIPF](np.random.default_rng(seed)) for seed in range(SEEDS)]
    found: Figures = {
        split: [_point(drawn, split, target) for target in TARGETS] for split in ("even", "level")
    }
    start = [layouts.score(load, table).mean() - 1.0 for load, table in drawn]
    found["start"] = statistics.fmean(float(score) for score in start)
    return found


def _point(drawn: list[tuple[Ints, Ints]], split: str, target: float) -> dict[str, float]:
    plans = [
        plan(load, slots=layouts.SLOTS, ranks=layouts.RANKS, installed=_flat(table), target=target,
             split=split)
        for load, table in drawn
    ]  # fmt: skip
    return {
        "target": target,
        "imbalance": statistics.fmean(made.predicted_imbalance for made in plans),
        "moves": statistics.fmean(made.moves for made in plans),
    }


def anew() -> list[Figures]:
    """One draw for each shape: imbalance of the published rule and of ours, split evenly."""
    found = []
    for shape in SHAPES.values():
        drawn = np.random.default_rng(0).standard_normal((shape.layers, shape.experts))
        load = np.rint(layouts.ROWS * np.exp(SIGMA * drawn)).astype(np.int64)
        row: Figures = {"shape": vars(shape)}
        for policy in ("greedy", "best"):
            table = deepseek.rebalance_experts(load, shape.slots, 1, 1, shape.ranks, policy=policy)
            placement = table[0].numpy().astype(np.int32)
            layout = Layout(placement, even_shares(placement, shape.experts))
            row[policy] = float(imbalance(load, layout, shape.ranks).mean())
        found.append(row)
    return found


def _flat(table: Ints) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return table.reshape(layouts.LAYERS, -1).astype(np.int32)


def main() -> None:
    """Measure, and keep the figures."""
    figures = {
        "slots": layouts.LAYERS * layouts.SLOTS,
        "starts": starts(),
        "later": later(),
        "curve": curve(),
        "anew": anew(),
    }
    save("even_split", ["python", "benchmarks/even_split.py"], figures)


if __name__ == "__main__":
    main()
