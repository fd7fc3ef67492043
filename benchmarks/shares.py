"""Shares that follow the traffic, beside shares that stay: what a switch of traffic costs.

    python benchmarks/shares.py             the shipped model's routing and the generator's
    python benchmarks/shares.py --quick     one seed, for a look; nothing is kept

A placement is planned (`connected`) on a window of 16 steps; then come 16 more, of another kind of
text (`switch`) or of the same (`steady`), and no weight moves. Each share mode routes them by the
engine's own code (`engine_rig.py`): real rows in real slots, so the noise of drawing a copy for
each row is in the figures. `foreseen` are static shares that were solved on the very window that
they are judged on: what shares can do at best that stay as they are for a window. Lagged shares
are summed over sub-windows of 1, 2 and 4 steps, of which each is in use two steps after its end.

Writes benchmarks/results/shares.json; `python benchmarks/performance.py` shows it.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from engine_rig import Batches, Cadence, Floats, Rig, rig
from evidence import save
from loads import Counts, Model, windows
from recorded import Recording, recordings

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.config import ShareMode
from equipoise.balancer.experts.layout import Layout, solve_shares
from equipoise.balancer.experts.placement import Shape

WINDOW, PHASE, SEEDS = 16, 40, 5
SUBS = 1, 2, 4
MODEL = Model(layers=6, experts=64, ranks=8, period=2, sub_windows=WINDOW)
RECORDED = ((4, 36), (4, 40), (6, 36), (6, 42), (8, 40), (8, 48))
"""Ranks and slots for 32 experts: with one or two slots a rank more than experts, where they divide
so."""
GENERATED = ((8, 72), (8, 80))


@dataclass(frozen=True)
class Case:
    """Two windows.

    Attributes:
        kind: switch or steady.
        before: what a placement is planned on, and served first.
        after: what it is judged on.
        experts: of a layer.
    """

    kind: str
    before: Batches
    after: Batches
    experts: int


def recorded_cases(found: Recording) -> Iterator[Case]:
    """Of every switch: the windows before and after it, and the last two before it."""
    for switch in found.switches:
        for kind, middle in (("switch", switch), ("steady", switch - WINDOW)):
            before, after = found.steps[middle - WINDOW : middle], found.steps[middle:]
            yield Case(
                kind,
                [list(step.ids) for step in before],
                [list(step.ids) for step in after[:WINDOW]],
                found.experts,
            )


def generated_cases(seed: int) -> Iterator[Case]:
    """Of the generator: neighbouring windows, every other pair of two domains."""
    for before, after in pairwise(windows(MODEL, seed, 6)):
        kind = "switch" if after.switched else "steady"
        yield Case(kind, _rows(before.counts), _rows(after.counts), MODEL.experts)


def _rows(counts: Counts) -> Batches:
    """One expert id for each row that is counted."""
    experts = np.arange(counts.shape[2], dtype=np.int32)
    return [[np.repeat(experts, layer) for layer in step] for step in counts]


def summed(batches: Batches, experts: int) -> Counts:
    """(layers, experts): rows of all steps."""
    counts = [[np.bincount(ids.ravel(), minlength=experts) for ids in step] for step in batches]
    total: Counts = np.array(counts, dtype=np.int64).sum(axis=0)
    return total


def judge(device: Rig, case: Case, ranks: int, slots: int) -> dict[str, Floats]:
    """(steps,) of the second window: imbalance, mean over layers, of every way to share."""
    load = summed(case.before, case.experts)
    planned = plan(load, slots=slots, ranks=ranks, policy="connected")
    shape = Shape(load.shape[0], case.experts, slots, ranks)
    start = Layout(planned.placement, planned.shares)
    later = solve_shares(summed(case.after, case.experts), planned.placement, shape)
    foreseen = Layout(planned.placement, later)
    whole = [*case.before, *case.after]

    def shared(layout: Layout, mode: ShareMode, sub: int = 1) -> Floats:
        found: Floats = device.imbalance(whole, layout, shape, mode, Cadence(WINDOW, sub))
        return found[WINDOW:].mean(axis=1)

    return {
        "static": shared(start, ShareMode.STATIC),
        **{f"lagged_{sub}": shared(start, ShareMode.LAGGED, sub) for sub in SUBS},
        "foreseen": shared(foreseen, ShareMode.STATIC),
        "exact": shared(start, ShareMode.EXACT),
    }


def summary(found: Sequence[dict[str, Floats]]) -> dict[str, Any]:
    """Means over the window; how far below static, over all cases, and the least and most."""
    means = {name: np.array([row[name].mean() for row in found]) for name in found[0]}
    below = {
        name: {
            "mean": float(1.0 - values.mean() / means["static"].mean()),
            "least": float((1.0 - values / means["static"]).min()),
            "most": float((1.0 - values / means["static"]).max()),
        }
        for name, values in means.items()
    }
    return {
        "cases": len(found),
        "imbalance": {name: float(values.mean()) for name, values in means.items()},
        "below_static": below,
    }


def measure(
    device: Rig, cases: Sequence[Case], groups: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """One row for each number of ranks and slots."""
    rows = []
    for ranks, slots in groups:
        judged: dict[str, list[dict[str, Floats]]] = {}
        for case in cases:
            judged.setdefault(case.kind, []).append(judge(device, case, ranks, slots))
        rows.append(
            {"ranks": ranks, "slots": slots, "experts": cases[0].experts}
            | {kind: summary(found) for kind, found in judged.items()}
        )
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """A line for the terminal."""
    for kind in ("switch", "steady"):
        told = row[kind]["imbalance"].items()
        below = row[kind]["below_static"]["lagged_2"]
        print(
            f"{row['ranks']:3} ranks {row['slots']:3} slots {kind:7}",
            *(f"{name} {value:.4f}" for name, value in told),
            f"lagged_2 below static {below['mean']:.1%} ({below['least']:.1%} to "
            f"{below['most']:.1%})",
        )


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, not kept")
    chosen = parser.parse_args()
    seeds = range(1 if chosen.quick else SEEDS)
    found = recordings(seeds, 3 * PHASE)
    model = [case for one in found for case in recorded_cases(one)]
    synthetic = [case for seed in seeds for case in generated_cases(seed)]
    with rig() as device:
        figures = {
            "seeds": len(seeds),
            "window": WINDOW,
            "recorded": measure(device, model, RECORDED),
            "generated": measure(device, synthetic, GENERATED),
        }
    if not chosen.quick:
        save("shares", ["python", "benchmarks/shares.py"], figures)


if __name__ == "__main__":
    main()
