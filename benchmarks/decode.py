"""How many experts a rank runs while decoding: what a memory-bound step waits for.

    python benchmarks/decode.py             five seeds: some minutes
    python benchmarks/decode.py --quick     one seed, for a look; nothing is kept

Batches are sequences that the shipped model decodes together, so many of one step. A placement is
planned on twelve steps of one kind of text and judged on the next twelve, as the mean over batches
and layers of the most experts that a rank runs: a copy runs if it gets any row. Ways to send rows:

- `split`: each row by the plan's shares, as engines with shares do;
- `even`: each row to any copy, as engines without shares do;
- `matched`: in every batch all rows of an expert to one copy, chosen on the batch itself so that
  the largest rank runs as few as it can (METRO, arXiv 2512.09277; `matching.py`).

`bound` is the number of experts that run over the number of ranks, rounded up. With whole shares,
as `objective="active_experts"` gives them, `split` sends all rows of an expert to one copy.

Writes benchmarks/results/decode.json; `python benchmarks/performance.py` shows it.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from evidence import save
from loads import Counts
from matching import matched
from recorded import Recording, counted, recordings

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.layout import Layout
from equipoise.balancer.experts.placement import SHARE_ONE

PHASE, WARM, STEPS, SEEDS = 40, 16, 12, 5
SEQUENCES = 8, 32, 64
GROUPS = ((4, 32), (4, 40), (8, 32), (8, 48))
JUDGED = 12
"""Batches of a case that are judged, spread over its steps."""


def batches(found: Recording, first: int, sequences: int) -> Counts:
    """(batches, layers, experts): rows of so many decoded sequences at a time."""
    cut = [
        counted(step.decoding[:, place : place + sequences], found.experts)
        for step in found.steps[first : first + STEPS]
        for place in range(0, step.decoding.shape[1] - sequences + 1, sequences)
    ]
    return np.stack(cut)


def judge(after: Counts, layout: Layout, ranks: int, rng: np.random.Generator) -> dict[str, float]:
    """Most experts on a rank, mean over batches and layers, by the way that rows are sent."""
    found = [
        _most(rows, layout.placement[layer], layout.shares[layer] / SHARE_ONE, ranks, rng)
        for batch in after
        for layer, rows in enumerate(batch)
    ]
    return {way: float(np.mean([row[way] for row in found])) for way in found[0]}


def _most(
    rows: Counts, placement: Any, shares: Any, ranks: int, rng: np.random.Generator
) -> dict[str, int]:
    """Of one batch and layer."""
    size = placement.size // ranks
    running = {way: np.zeros(ranks, dtype=np.int64) for way in ("split", "even")}
    homes = []
    for expert in np.flatnonzero(rows):
        slots = np.flatnonzero(placement == expert)
        homes.append(sorted(set((slots // size).tolist())))
        for way, part in (("split", shares[slots]), ("even", np.full(slots.size, 1 / slots.size))):
            got = rng.multinomial(rows[expert], part) > 0
            running[way][np.unique(slots[got] // size)] += 1
    chosen = np.bincount(matched(homes, ranks), minlength=ranks)
    return {
        **{way: int(runs.max()) for way, runs in running.items()},
        "matched": int(chosen.max()),
        "bound": -(-len(homes) // ranks),
    }


def measure(passes: Sequence[Recording], sequences: int) -> list[dict[str, Any]]:
    """One row for each group and objective."""
    told: dict[tuple[int, int, str], list[tuple[float, dict[str, float]]]] = {}
    rng = np.random.default_rng(0)
    for found in passes:
        for phase in (0, *found.switches):
            before = batches(found, phase + WARM, sequences)
            after = batches(found, phase + WARM + STEPS, sequences)
            after = after[:: max(1, len(after) // JUDGED)]
            for ranks, slots in GROUPS:
                for goal in ("tokens", "active_experts"):
                    planned = plan(
                        before, slots=slots, ranks=ranks, policy="connected", objective=goal
                    )
                    layout = Layout(planned.placement, planned.shares)
                    told.setdefault((ranks, slots, goal), []).append(
                        (planned.predicted_imbalance, judge(after, layout, ranks, rng))
                    )
    return [_row(sequences, *group, found) for group, found in told.items()]


def _row(
    sequences: int, ranks: int, slots: int, goal: str, found: list[tuple[float, dict[str, float]]]
) -> dict[str, Any]:
    row = {
        "sequences": sequences,
        "ranks": ranks,
        "slots": slots,
        "objective": goal,
        "cases": len(found),
        "promised": float(np.mean([promise for promise, _ in found])),
        **{way: float(np.mean([most[way] for _, most in found])) for way in found[0][1]},
    }
    print(" ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    return row


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, not kept")
    chosen = parser.parse_args()
    passes = list(recordings(range(1 if chosen.quick else SEEDS), 3 * PHASE))
    rows = [row for sequences in SEQUENCES for row in measure(passes, sequences)]
    if not chosen.quick:
        save("decode", ["python", "benchmarks/decode.py"], {"seeds": len(passes), "rows": rows})


if __name__ == "__main__":
    main()
