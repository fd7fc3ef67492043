"""What the placement policy moves on steady windows, and what moving less would cost in balance.

    python benchmarks/policy_moves.py            five seeds drawn anew: a minute
    python benchmarks/policy_moves.py --quick    one seed
    python benchmarks/policy_moves.py --seeds 7 8

Needs no vLLM: the proposals are those of `IncrementalEplbPolicy`, and *stock* is the published
greedy rule, which vLLM's policy follows without nodes. The popularity of experts never changes.
What does from window to window is the sample, of so many rows a layer, or also the popularity in
each of 16 sub-windows, by a log-normal factor (`jitter`). The plan made on a window is judged on
the next one. Imbalance is max/mean - 1 of the ranks, mean over layers, by even splits. Prints;
keeps nothing.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from lib.loads import Counts, Model, windows

from equipoise import _native
from equipoise.balancer.compat.placement_policy import max_rank_rows
from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, Placement
from equipoise.integrations.vllm.eplb.policy_plan import plan_placement
from equipoise.integrations.vllm.settings import EplbPolicySettings

SHAPE = ExpertShape(layers=58, experts=256, slots=288, ranks=32)
WINDOWS, SEEDS = 8, 5
WAYS = {
    "default": EplbPolicySettings(),
    "gain 0.05": EplbPolicySettings(min_gain=0.05),
    "target 0.05": EplbPolicySettings(target=0.05),
}
NEVER = "first plan kept"
LINE = "{load:22} {way:16} moved {moved:6.2%}, next window {after:.4f}, stock's {stock:.4f}\n"


def sampled(seed: int, rows: int) -> Iterator[Counts]:
    """Windows that are samples of one popularity."""
    rng = np.random.default_rng(seed)
    odds = np.exp(rng.standard_normal((SHAPE.layers, SHAPE.experts)))
    odds /= odds.sum(axis=1, keepdims=True)
    for _ in range(WINDOWS):
        yield np.stack([rng.multinomial(rows, each) for each in odds]).astype(np.int64)


def jittered(seed: int, jitter: float) -> Iterator[Counts]:
    """Windows of the generator, 524,288 rows a layer, without a switch."""
    model = Model(
        layers=SHAPE.layers, experts=SHAPE.experts, ranks=SHAPE.ranks, jitter=jitter, period=99
    )
    for window in windows(model, seed, WINDOWS):
        yield window.load


LOADS: dict[str, Callable[[int], Iterator[Counts]]] = {
    "1,000,000 rows": lambda seed: sampled(seed, 1_000_000),
    "100,000 rows": lambda seed: sampled(seed, 100_000),
    "30,000 rows": lambda seed: sampled(seed, 30_000),
    "jitter 0.15": lambda seed: jittered(seed, 0.15),
    "jitter 0.3": lambda seed: jittered(seed, 0.3),
    "jitter 0.6": lambda seed: jittered(seed, 0.6),
}


def imbalance(load: Counts, placement: Placement) -> float:
    """max/mean - 1 of the ranks by an even split, mean over layers."""
    mean = load.sum(axis=1) / SHAPE.ranks
    return float((max_rank_rows(load, placement, SHAPE.ranks) / SHARE_ONE / mean - 1).mean())


def follow(loads: list[Counts], way: str) -> Iterator[tuple[float, float, float]]:
    """Part of the slots moved, imbalance of the next window, and stock's; but for the first plan,
    which leaves vLLM's first map."""
    row = np.arange(SHAPE.slots, dtype=np.int32) % SHAPE.experts
    installed = np.tile(row, (SHAPE.layers, 1))
    for number, (load, after) in enumerate(pairwise(loads)):
        moved_slots = 0
        if way != NEVER or number == 0:
            new_plan = plan_placement(load, SHAPE, installed, WAYS.get(way, EplbPolicySettings()))
            moved_slots, installed = new_plan.moved_slots, new_plan.placement.astype(np.int32)
        stock = _native.plan_greedy(load, SHAPE.slots, SHAPE.ranks)
        if number:
            yield moved_slots / installed.size, imbalance(after, installed), imbalance(after, stock)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="none are drawn then")
    options = parser.parse_args()
    random_seeds = (
        np.random.default_rng().integers(10**6, size=1 if options.quick else SEEDS).tolist()
    )
    seeds = options.seeds or random_seeds
    sys.stdout.write(f"seeds {' '.join(map(str, seeds))}\n")
    for name, make_loads in LOADS.items():
        runs = [list(make_loads(seed)) for seed in seeds]
        for way in (*WAYS, NEVER):
            rows = [row for loads in runs for row in follow(loads, way)]
            moved_part, after, stock = np.mean(rows, axis=0).tolist()
            sys.stdout.write(
                LINE.format(load=name, way=way, moved=moved_part, after=after, stock=stock)
            )


if __name__ == "__main__":
    main()
