"""Does it help to know how loads vary, and what varies together? Next batches' imbalance.

    python benchmarks/variance.py             five seeds: some minutes
    python benchmarks/variance.py --quick     one seed, for a look; nothing is kept

A placement is planned on the sub-windows of a window and judged on batches after it, with the
plan's own shares, as the mean of max/mean - 1 over batches and layers. Rows of a copy are its share
of the batch's rows: no noise of drawing. Kinds of windows:

- `same`: 16 steps of the shipped model's recorded routing, each a sub-window; then 16 more steps
  of the same kind of text;
- `mixed`: a whole pass with all three kinds of text, in sub-windows of 4 steps; then every step of
  another seed's pass: what a window that is longer than a phase sees;
- `generated`: neighbouring windows of `loads.py`, one domain, 16 sub-windows.

Ways to plan: `sigma` as it ships, which trades places by the covariance of the windows; beside it
trades from the `connected` plan by a prototype (`risk.py`): by the mean alone, by each expert's
variance, and by the covariance's first directions, or all. With level shares only experts with one
copy trade places, which leaves the ranks connected; with even shares any may.

Writes benchmarks/results/variance.json; `python benchmarks/performance.py` shows it.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from evidence import save
from loads import Counts, Model, windows
from recorded import Recording, recordings
from risk import Packing, moments

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.layout import Layout, even_shares, solve_shares
from equipoise.balancer.experts.placement import SHARE_ONE, Placement, Shape, Shares

PHASE, WINDOW, LONG, SEEDS = 40, 16, 4, 5
WARM = 8
"""Steps that a phase needs until it decodes as much as it does later."""
ALL = 1 << 10
MODEL = Model(layers=6, experts=64, ranks=8, sub_windows=WINDOW)
RECORDED, GENERATED = ((4, 40), (8, 40), (8, 48)), ((8, 72),)


@dataclass(frozen=True)
class Case:
    """What is planned on, (sub-windows, layers, experts), and judged on, (batches, ...)."""

    kind: str
    before: Counts
    after: Counts


@dataclass(frozen=True)
class Way:
    """How to plan.

    Attributes:
        sigma: as `plan` takes it.
        risk: standard deviations of a rank above its mean that trades look at; None for no trades.
        directions: of the covariance.
    """

    sigma: float = 0.0
    risk: float | None = None
    directions: int = 0


WAYS = {
    "sigma 0": Way(),
    **{f"sigma {sigma:g}": Way(sigma) for sigma in (0.5, 1.0, 2.0)},
    "trades by the mean": Way(0.0, 0.0, 0),
    "trades by each expert's variance, z 1": Way(0.0, 1.0, 0),
    **{f"trades by {k} direction(s), z 1": Way(0.0, 1.0, k) for k in (1, 2, 4)},
    **{f"trades by the covariance, z {z:g}": Way(0.0, z, ALL) for z in (0.5, 1.0, 2.0)},
}


def recorded_cases(passes: Sequence[Recording]) -> Iterator[Case]:
    """Of every pass, and of every pass with the next."""
    rows = [one.rows() for one in passes]
    for number, one in enumerate(passes):
        for first in (0, *one.switches):
            middle = first + WARM + WINDOW
            before, after = rows[number][middle - WINDOW : middle], rows[number][middle:]
            yield Case("same", before, after[:WINDOW])
        whole = rows[number][WARM:]
        subs = whole.reshape(-1, LONG, *whole.shape[1:]).sum(axis=1)
        yield Case("mixed", subs, rows[(number + 1) % len(rows)][WARM:])


def generated_cases(seed: int) -> Iterator[Case]:
    """Windows of one domain."""
    for before, after in pairwise(windows(MODEL, seed, MODEL.period)):
        yield Case("generated", before.counts, after.counts)


def planned(load: Counts, ranks: int, slots: int, way: Way, split: str) -> Layout:
    """A placement and its shares."""
    found = plan(
        load, slots=slots, ranks=ranks, policy="connected", sigma=way.sigma, split=split
    )  # fmt: skip
    if way.risk is None:
        return Layout(found.placement, found.shares)
    placement = found.placement.copy()
    for layer, row in enumerate(placement):
        alone = np.bincount(row, minlength=load.shape[2])[row] == 1
        packing = Packing(row.astype(np.int64), found.shares[layer] / SHARE_ONE, ranks)
        known = moments(load[:, layer], way.directions)
        packing.search(known, way.risk, alone | (split == "even"))
        placement[layer] = packing.expert
    return Layout(placement, _shares(load, placement, ranks, split))


def _shares(load: Counts, placement: Placement, ranks: int, split: str) -> Shares:
    shape = Shape(*load.shape[1:], placement.shape[1], ranks)
    if split == "even":
        return even_shares(placement, shape.experts)
    return solve_shares(load.sum(axis=0), placement, shape)


def imbalance(batches: Counts, layout: Layout, ranks: int) -> float:
    """Mean over batches (batches, layers, experts) and layers of max/mean - 1."""
    rows = np.take_along_axis(batches, layout.placement.astype(np.int64)[None], axis=2)
    full = (rows * layout.shares).reshape(*batches.shape[:2], ranks, -1).sum(axis=3)
    return float((full.max(axis=2) / full.mean(axis=2) - 1.0).mean())


def measure(cases: Sequence[Case], groups: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """One row for each group, split and kind: imbalance by way."""
    rows = []
    for ranks, slots in groups:
        for split in ("level", "even"):
            for kind in dict.fromkeys(case.kind for case in cases):
                chosen = [case for case in cases if case.kind == kind]
                found = {
                    name: [
                        imbalance(c.after, planned(c.before, ranks, slots, way, split), ranks)
                        for c in chosen
                    ]
                    for name, way in WAYS.items()
                }
                rows.append(_row(kind, ranks, slots, split, found))
                show(rows[-1])
    return rows


def _row(
    kind: str, ranks: int, slots: int, split: str, found: dict[str, list[float]]
) -> dict[str, Any]:
    plain = np.array(found["sigma 0"])
    return {
        "kind": kind,
        "ranks": ranks,
        "slots": slots,
        "split": split,
        "cases": plain.size,
        "imbalance": {name: float(np.mean(told)) for name, told in found.items()},
        "better_in": {name: int((np.array(told) < plain).sum()) for name, told in found.items()},
    }


def show(row: dict[str, Any]) -> None:
    """A block for the terminal."""
    print(f"{row['kind']}, {row['ranks']} ranks, {row['slots']} slots, {row['split']} shares")
    plain = row["imbalance"]["sigma 0"]
    for name, value in row["imbalance"].items():
        better = f"better in {row['better_in'][name]} of {row['cases']}"
        print(f"  {name:40} {value:.4f} {value / plain - 1:+7.1%}  {better}")


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, not kept")
    chosen = parser.parse_args()
    seeds = range(1 if chosen.quick else SEEDS)
    model = list(recorded_cases(list(recordings(seeds, 3 * PHASE))))
    synthetic = [case for seed in seeds for case in generated_cases(seed)]
    rows = [*measure(model, RECORDED), *measure(synthetic, GENERATED)]
    if not chosen.quick:
        save("variance", ["python", "benchmarks/variance.py"], {"seeds": len(seeds), "rows": rows})


if __name__ == "__main__":
    main()
