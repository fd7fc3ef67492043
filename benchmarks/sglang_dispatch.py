"""What SGLang's dispatch makes of SGLang's own plans, by its bit-exact model.

    python benchmarks/sglang_dispatch.py

Loads are those of `lib/loads.py`, calibrated as it says and with more skew; every rank sends an
equal part of every expert's rows. Max / mean of the ranks, mean over layers and seeds, and the
worst layer: by even parts, which the plan assumes; by `static` and `dynamic` after a rebalance;
and by both where the server was started with the same placement (`--init-expert-location`).

*Lowest replica* is no rule of SGLang: a rank uses its own replica, else the one with the lowest
number. It is the reading of `static` behind a published figure.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from lib.loads import Model, windows

from equipoise.balancer.experts.placement import ExpertShape, Load, Placement
from equipoise.report.replay.engine_model import WindowLoad
from equipoise.report.replay.engines.sglang import ExpertLocations, sglang_model

SETTINGS = (
    (128, 144, 8, 1, 94),
    (256, 288, 32, 1, 58),
    (256, 288, 32, 4, 58),
    (256, 320, 64, 8, 58),
)
"""Experts, slots, ranks, nodes and layers; the first is that of the published figure."""
SKEWS = 1.12, 1.5
SEEDS = 3

Parts = npt.NDArray[np.floating]
Rule = Callable[[Placement, ExpertShape], Parts]


def max_over_mean(load: Load, parts: Parts, placement: Placement, ranks: int) -> Parts:
    """(layers,)."""
    rows = np.take_along_axis(load, placement.astype(np.int64), axis=1) * parts
    by_rank = rows.reshape(len(load), ranks, -1).sum(axis=2)
    found: Parts = by_rank.max(axis=1) / by_rank.mean(axis=1)
    return found


def lowest_replica(placement: Placement, shape: ExpertShape) -> Parts:
    """Parts of slots if a rank without a replica uses the lowest."""
    location = ExpertLocations().of(placement, shape)
    lowest = np.broadcast_to(location.maps.logical_to_physical[:, :, 0], location.nearest.shape)
    slots = np.where(location.nearest >= 0, location.nearest, lowest)
    layer = np.broadcast_to(np.arange(shape.layers)[:, None], slots.shape)
    parts = np.zeros((shape.layers, shape.slots))
    np.add.at(parts, (layer, slots), 1 / shape.ranks)
    return parts


def measure(setting: tuple[int, ...], skew: float) -> dict[str, tuple[float, float]]:
    """Mean and worst of each rule."""
    experts, slots, ranks, nodes, layers = setting
    shape = ExpertShape(layers, experts, slots, ranks)
    found: dict[str, list[Parts]] = {}
    for seed in range(SEEDS):
        (window,) = windows(Model(layers=layers, experts=experts, ranks=ranks, sigma=skew), seed, 1)
        load = window.load
        by_slot = np.zeros((layers, slots), dtype=np.int64)
        planned, started = sglang_model(nodes), sglang_model(nodes)
        placement = planned.planner(WindowLoad(load, by_slot, 16), by_slot, shape)
        static, dynamic, even, _ = planned.rules
        rules: dict[str, Rule] = {
            "even": even.parts,
            "static": static.parts,
            "dynamic": dynamic.parts,
            "static, started": started.rules[0].parts,
            "dynamic, started": started.rules[1].parts,
            "lowest replica": lowest_replica,
        }
        for name, parts in rules.items():
            ratio = max_over_mean(load, parts(placement, shape), placement, ranks)
            found.setdefault(name, []).append(ratio)
    return {name: (float(np.mean(each)), float(np.max(each))) for name, each in found.items()}


if __name__ == "__main__":
    for setting in SETTINGS:
        for skew in SKEWS:
            print(
                "{} experts, {} slots, {} ranks, {} nodes, {} layers,".format(*setting),
                "skew",
                skew,
            )
            for name, (mean, worst) in measure(setting, skew).items():
                print(f"    {name:18} {mean:.4f}  worst {worst:.3f}")
