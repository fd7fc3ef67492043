"""Rows that stay on their rank, with and without a preference for local replicas.

    python benchmarks/locality.py             the shipped model's routing, three numbers of ranks
    python benchmarks/locality.py --quick     fewer steps, for a look; nothing is kept

A placement is planned (`connected`) on a window of 16 steps; the 16 behind it are served with exact
shares, every rank with its even part of each batch, once as `exact` divides rows and once with
`locality: prefer`. Figures: the part of all rows whose replica is on their own rank, and the
imbalance of the ranks, both as routed. Whole rows in real slots, by the functions that the routers
run; nothing is timed.

Writes benchmarks/results/locality.json; `python benchmarks/performance.py` shows it.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from evidence import save
from recorded import Recording, recordings
from shares import PHASE, RECORDED, WINDOW, Case, recorded_cases, summed
from tables import locality
from torch import Tensor

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.locality import local_cumulative
from equipoise.hal.kernels import Salt
from equipoise.hal.routing import (
    RoutingTable,
    build_table,
    count_experts,
    route_apportioned,
    solve_shares,
)

QUICK = 2
"""Steps of a window that a look takes."""


@dataclass(frozen=True)
class Found:
    """Of one batch of one layer: part of the rows at home, and max/mean - 1 of the ranks."""

    home: float
    imbalance: float


def routed(tables: list[RoutingTable], parts: list[Tensor], layer: int) -> Found:
    """Every rank's part of a batch, by its own table."""
    ranks = len(parts)
    sent = torch.zeros(ranks, ranks, dtype=torch.int64)
    for rank, (own, ids) in enumerate(zip(tables, parts, strict=True)):
        slots, _ = route_apportioned(ids, own, rank, layer)
        homes = torch.div(slots, own.slots // ranks, rounding_mode="floor")
        sent[rank] = torch.bincount(homes, minlength=ranks)
    loads = sent.sum(0).double()
    home = float(sent.diagonal().sum() / sent.sum())
    return Found(home, float(loads.max() / loads.mean()) - 1.0)


def both(ids: Tensor, placement: Tensor, experts: int, ranks: int, layer: int) -> tuple[Found, ...]:
    """As exact shares divide a batch, and with a preference for local replicas."""
    parts = [part.flatten() for part in torch.tensor_split(ids, ranks)]
    counts = torch.stack([count_experts(part, experts) for part in parts]).long()
    shares = solve_shares(counts.sum(0)[None], placement[None], ranks)[0]
    alike = build_table(placement, shares, experts)
    own = [
        local_cumulative(
            counts, alike.start, alike.replicas, alike.cumulative, Salt(rank, layer, 0)
        )
        for rank in range(ranks)
    ]
    local = [RoutingTable(alike.start, alike.replicas, shares) for shares in own]
    return routed([alike] * ranks, parts, layer), routed(local, parts, layer)


def judge(case: Case, ranks: int, slots: int, steps: int) -> list[tuple[Found, ...]]:
    """Every step and layer of the second window."""
    load = summed(case.before, case.experts)
    placed = plan(load, slots=slots, ranks=ranks, policy="connected").placement
    return [
        both(torch.from_numpy(ids), torch.from_numpy(row.copy()), case.experts, ranks, layer)
        for batches in case.after[:steps]
        for layer, (ids, row) in enumerate(zip(batches, placed, strict=True))
    ]


def measure(found: Recording, steps: int) -> list[dict[str, Any]]:
    """One row for each number of ranks and slots."""
    rows = []
    cases = list(recorded_cases(found))
    for ranks, slots in RECORDED:
        pairs = [pair for case in cases for pair in judge(case, ranks, slots, steps)]
        ways = {}
        for number, name in enumerate(("any", "prefer")):
            ways[name] = {
                "home": float(np.mean([pair[number].home for pair in pairs])),
                "imbalance": float(np.mean([pair[number].imbalance for pair in pairs])),
            }
        rows.append({"ranks": ranks, "slots": slots, "batches": len(pairs), "ways": ways})
        sys.stderr.write(f"{ranks} ranks, {slots} slots\n")
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps; nothing is kept")
    quick = parser.parse_args().quick
    [found] = recordings(range(1), 3 * PHASE)
    figures = {"rows": measure(found, QUICK if quick else WINDOW)}
    sys.stdout.write("\n".join(locality(figures)) + "\n")
    if not quick:
        save("locality", ["python", "benchmarks/locality.py"], figures)


if __name__ == "__main__":
    main()
