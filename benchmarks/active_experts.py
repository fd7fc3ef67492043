"""What counting with deviations is worth where active experts are planned for, and what it costs.

    python benchmarks/active_experts.py                 both shapes, three seeds: some minutes
    python benchmarks/active_experts.py --seeds 3 14    the loads of these seeds, to see them again
    python benchmarks/active_experts.py --quick         one seed, the small shape

Batches are sub-windows of `lib/loads.py`, of seeds drawn anew each time: of one kind of text, of
four that share many experts (the calibrated model), or of four with experts of their own, many or
few. A placement is planned on `BATCHES` of them and judged on as many later ones, `anew` and,
`later`, planned on these from what is installed. Both are the experts that the fullest rank runs,
mean over batches, layers and seeds; `moved` is slots, of the latter plan. Seconds are of CPU, of
one thread. Each figure is without deviations, to that with `sigma` 1, and the least and the most
ratio of a seed. Keeps nothing.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from lib.loads import Counts, Model, windows

from equipoise.balancer.experts import Plan, plan
from equipoise.balancer.experts.placement import Placement

BATCHES, SEEDS = 64, 3
SHAPES = {
    "6 layers x 64 experts, 8 ranks": (Model(layers=6, experts=64, ranks=8, rows=4), (64, 72)),
    "58 layers x 256 experts, 32 ranks": (Model(rows=16), (256, 288)),
}
"""Rows of a rank and batch are few, as in decoding; then the slots that are tried."""
TRAFFIC = {
    "one kind of text": {"period": 1 << 20},
    "four that share experts": {"period": 1},
    "four with their own": {"period": 1, "dominant": 1.0, "domain": 0.95},
    "four with few of their own": {"period": 1, "dominant": 1.0, "domain": 0.95, "sigma": 3.0},
}

COLUMNS = {
    "anew": ".3f", "later": ".3f", "moved": ".1%", "anew_seconds": ".3f", "later_seconds": ".3f",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Of one `sigma`: of the plan anew and of the next one from there."""

    anew: float
    later: float
    moved: float
    anew_seconds: float
    later_seconds: float


def parts(model: Model, seed: int) -> Iterator[Counts]:
    """Three times (`BATCHES`, layers, experts) of the same traffic."""
    topics = model.domains if model.period == 1 else 1
    counts = [
        w.counts for w in windows(replace(model, sub_windows=BATCHES // topics), seed, 3 * topics)
    ]
    for first in range(0, 3 * topics, topics):
        yield np.concatenate(counts[first : first + topics])


def waits(batches: Counts, new_plan: Plan, ranks: int) -> float:
    """Experts that the fullest rank runs, mean over batches and layers."""
    most = [
        (layer[:, placement] * shares > 0).reshape(len(layer), ranks, -1).sum(axis=2).max(axis=1)
        for layer, placement, shares in zip(
            batches.swapaxes(0, 1), new_plan.placement, new_plan.shares, strict=True
        )
    ]
    return float(np.mean(most))


def timed_plan(
    load: Counts, slots: int, ranks: int, sigma: float, installed: Placement | None
) -> tuple[Plan, float]:
    """A plan, and its CPU seconds."""
    began = time.process_time()
    new_plan = plan(
        load, slots=slots, ranks=ranks, installed=installed, sigma=sigma, objective="active_experts"
    )
    return new_plan, time.process_time() - began


def outcome(model: Model, slots: int, seed: int, sigma: float) -> Outcome:
    """Planned on the first part, judged on the second; planned on that, judged on the third."""
    first, second, third = parts(model, seed)
    anew, anew_seconds = timed_plan(first, slots, model.ranks, sigma, None)
    later, later_seconds = timed_plan(second, slots, model.ranks, sigma, anew.placement)
    return Outcome(
        waits(second, anew, model.ranks),
        waits(third, later, model.ranks),
        later.moves / later.placement.size,
        anew_seconds,
        later_seconds,
    )


def row(name: str, without: list[Outcome], with_deviations: list[Outcome]) -> str:
    """Both on one line of a table."""

    def both(what: str, form: str) -> str:
        means = [
            statistics.fmean(getattr(o, what) for o in outcomes)
            for outcomes in (without, with_deviations)
        ]
        pairs = zip(without, with_deviations, strict=True)
        ratios = [getattr(two, what) / max(getattr(one, what), 1e-9) for one, two in pairs]
        text = " to ".join(format(mean, form) for mean in means)
        return f"{text}, x {min(ratios):.3f} to {max(ratios):.3f}" if what != "moved" else text

    figures = [both(what, form) for what, form in COLUMNS.items()]
    return f"| {' | '.join([name, *figures])} |"


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, help=f"of loads; {SEEDS} drawn anew if not")
    parser.add_argument("--quick", action="store_true", help="one seed, the small shape")
    options = parser.parse_args()
    count = 1 if options.quick else SEEDS
    seeds = options.seeds or np.random.default_rng().integers(10**6, size=count).tolist()
    sys.stderr.write(f"--seeds {' '.join(map(str, seeds))}\n")
    print(f"| loads | {' | '.join(COLUMNS)} |\n{'|---' * (1 + len(COLUMNS))}|")
    for shape, (model, slot_counts) in list(SHAPES.items())[: 1 if options.quick else None]:
        for slots in slot_counts:
            for kind, changes in TRAFFIC.items():
                load = replace(model, **changes)
                outcomes = [
                    [outcome(load, slots, seed, sigma) for seed in seeds] for sigma in (0, 1)
                ]
                print(row(f"{shape}, {slots} slots, {kind}", *outcomes), flush=True)


if __name__ == "__main__":
    main()
