"""The native core beside the torch references of the same semantics.

    python benchmarks/routing.py
    python benchmarks/routing.py --quick     one pair; nothing is kept

Each pair is timed in turns, native then reference, so that both see the same machine; a figure is
the median of the pairs' ratios with their spread. Shapes: 1,024 tokens x top-8 of 256 experts in
288 slots on 32 ranks.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from lib.results import Row, save, spread
from report import show

from equipoise import _native
from equipoise.hal import routing

PAIRS = 5
TOKENS, TOP_K, EXPERTS, SLOTS, RANKS = 1024, 8, 256, 288, 32
CHECKED_BYTES = 1 << 22


@dataclass(frozen=True)
class Contest:
    """Two ways to do the same thing."""

    name: str
    native: Callable[[], object]
    reference: Callable[[], object]
    against: str = "torch reference"


def seconds(work: Callable[[], object]) -> float:
    """Per call, over as many calls as fit in a few milliseconds."""
    began = time.perf_counter()
    work()
    once = time.perf_counter() - began
    calls = max(1, min(200, int(0.005 / max(once, 1e-7))))
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls


class Material:
    """One random load, a plan for it, and buffers."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        load = draw.lognormal(sigma=1.0, size=(1, EXPERTS))
        self.counts = (load * 1000).astype(np.int64)
        placement = _native.plan_greedy(self.counts, SLOTS, RANKS)
        shares = _native.solve_shares(self.counts, placement, RANKS)
        first, second = torch.from_numpy(placement[0]), torch.from_numpy(shares[0])
        self.table = routing.build_table(first, second, EXPERTS)
        parts = (self.table.start, self.table.replicas, self.table.cumulative)
        self.start, self.replicas, self.cumulative = (part.numpy() for part in parts)
        chances = (load / load.sum())[0]
        self.ids = draw.choice(EXPERTS, size=TOKENS * TOP_K, p=chances).astype(np.int32)
        self.slots, self.row_counts = np.empty_like(self.ids), np.empty(EXPERTS, dtype=np.int32)
        self.solved = np.empty_like(self.cumulative)
        self.data = torch.from_numpy(draw.integers(0, 256, CHECKED_BYTES, dtype=np.uint8))
        self.copied = torch.empty_like(self.data)


def contests(m: Material) -> list[Contest]:
    """Everything that is compared."""
    arrays = (m.ids, m.start, m.replicas, m.cumulative)
    batch, total = torch.from_numpy(m.ids), torch.from_numpy(m.counts[0])
    return [
        Contest(
            "route_hashed",
            lambda: _native.route_hashed(*arrays, 3, 1, 7, m.slots, m.row_counts),
            lambda: routing.route_hashed(batch, m.table, 3, 1, 7),
        ),
        Contest(
            "route_apportioned",
            lambda: _native.route_apportioned(*arrays, 3, 1, m.slots, m.row_counts),
            lambda: routing.route_apportioned(batch, m.table, 3, 1),
        ),
        Contest(
            "solve_cumulative",
            lambda: _native.solve_cumulative(m.counts[0], m.start, m.replicas, RANKS, 16, m.solved),
            lambda: routing.solve_cumulative(total, m.table, RANKS, 16),
        ),
        Contest(
            "checksum",
            lambda: _native.checksum(m.data.numpy()),
            lambda: m.copied.copy_(m.data),
            against="one memory copy of the same bytes",
        ),
    ]


def main() -> None:
    """Print the table and keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one pair; nothing is kept")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows: list[Row] = []
    for contest in contests(Material()):
        pairs = [
            (seconds(contest.native), seconds(contest.reference))
            for _ in range(1 if quick else PAIRS)
        ]
        rows.append({
            "operation": contest.name,
            "microseconds": statistics.median(native for native, _ in pairs) * 1e6,
            "ratio": spread(reference / native for native, reference in pairs),
            "against": contest.against,
        })  # fmt: skip
    show("routing", {}, {"operations": rows})
    if not quick:
        save("routing", ["python", "benchmarks/routing.py"], {}, {"operations": rows})


if __name__ == "__main__":
    main()
