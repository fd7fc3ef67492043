"""Placement in SGLang: what its own algorithm moves, what ours does, and how level it is served.

    PYTHONPATH=tests:tests/simulators .tox/engines/bin/python benchmarks/sglang_policy.py
    ... benchmarks/sglang_policy.py --quick    one seed, for a look; nothing is kept

SGLang's `rebalance_experts` (`--eplb-algorithm auto`) and our `plan_placement`, as the plugin calls
it, get the same windows of DeepSeek-V3's size; the kind of traffic switches twice. Each starts from
SGLang's trivial map and then from what it had planned itself. *Moved* is what ranks have to fetch
from others, as part of all slots.

Imbalance is max/mean - 1 of the ranks, mean over layers. *Planned* is on the window of the plan,
*next* on the window after it: both with an expert's tokens divided evenly among its slots, which is
what SGLang's dispatch `dynamic` draws. *Static* is that next window by SGLang's dispatch `static`,
where a rank sends an expert's tokens to one slot, its own or one of its node if there is one: by
SGLang's own table, with as many tokens on every rank.

Writes benchmarks/results/sglang_policy.json; `python benchmarks/report.py` shows it.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from lib.loads import Counts, Model, windows
from lib.results import Row, save, spread
from report import show
from sglang_cpu import stand_ins

from equipoise.balancer.experts.placement import ExpertShape, logical_maps
from equipoise.integrations.vllm.eplb.policy_plan import plan_placement
from equipoise.integrations.vllm.settings import EplbPolicySettings

stand_ins.install()
from sglang.srt.eplb import expert_location  # noqa: E402
from sglang.srt.eplb.eplb_algorithms import compute_algorithm, rebalance_experts  # noqa: E402

SHAPE = ExpertShape(layers=58, experts=256, slots=288, ranks=32)
NODES, GROUPS = 4, 8
"""DeepSeek-V3 has eight groups of experts, which SGLang ties to nodes."""
WINDOWS, PERIOD, SEEDS = 12, 4, 3
Table = npt.NDArray[np.int64]
Rival = Callable[[Counts, Table], Table]


def stock(nodes: int) -> Rival:
    """SGLang's algorithm for so many nodes; it does not look at what is installed."""
    algorithm = compute_algorithm(raw_algorithm="auto", num_groups=GROUPS, num_nodes=nodes)

    def plan(steps: Counts, installed: Table) -> Table:
        placement, _, _ = rebalance_experts(
            tokens_per_expert=torch.from_numpy(steps),
            num_physical_experts=SHAPE.slots,
            num_local_physical_experts=SHAPE.slots_per_rank,
            num_groups=GROUPS,
            num_nodes=nodes,
            algorithm=algorithm,
        )
        table: Table = placement.numpy().astype(np.int64)
        return table

    return plan


def ours(**settings: float) -> Rival:
    """The plugin's policy with these settings."""
    chosen = EplbPolicySettings(**settings)

    def plan(steps: Counts, installed: Table) -> Table:
        return plan_placement(steps, SHAPE, installed.astype(np.int32), chosen).placement

    return plan


RIVALS = {
    "SGLang, one node": stock(1),
    "SGLang, four nodes": stock(NODES),
    "`eplb_policy`": ours(),
    "`eplb_policy`, `min_gain` 0.05": ours(min_gain=0.05),
}


def copied_fraction(before: Table, after: Table) -> float:
    """Experts that ranks have now and had not, as part of all slots."""
    held = [np.zeros((SHAPE.layers, SHAPE.ranks, SHAPE.experts), dtype=bool) for _ in range(2)]
    for mask, table in zip(held, (before, after), strict=True):
        np.put_along_axis(mask, table.reshape(SHAPE.layers, SHAPE.ranks, -1), True, axis=2)
    return float((held[1] & ~held[0]).sum() / before.size)


def even_split(load: Counts, table: Table) -> float:
    """Imbalance where the slots of an expert take equal parts."""
    copies = np.stack([np.bincount(row, minlength=SHAPE.experts) for row in table])
    return imbalance(np.take_along_axis(load / copies, table, axis=1))


def static_dispatch(load: Counts, table: Table) -> float:
    """Imbalance by SGLang's table of which slot each rank sends an expert's tokens to."""
    logical = torch.from_numpy(logical_maps(table, SHAPE.experts).logical_to_physical)
    chosen = expert_location.compute_logical_to_rank_dispatch_physical_map(
        logical_to_all_physical_map=logical,
        ep_size=SHAPE.ranks,
        num_physical_experts=SHAPE.slots,
        ep_rank=slice(None),  # of all ranks
    ).numpy()
    rows = np.zeros((SHAPE.layers, SHAPE.slots))
    for of_rank in chosen:
        for layer, slots in enumerate(of_rank):
            np.add.at(rows[layer], slots, load[layer] / SHAPE.ranks)
    return imbalance(rows)


def imbalance(rows: npt.NDArray[np.float64]) -> float:
    """max/mean - 1 of the ranks, mean over layers, from rows by slot."""
    ranks = rows.reshape(SHAPE.layers, SHAPE.ranks, -1).sum(axis=2)
    return float((ranks.max(axis=1) / ranks.mean(axis=1) - 1).mean())


def trial(rival: Rival, seed: int) -> Iterator[dict[str, Any]]:
    """One rebalance after the other; the first leaves SGLang's trivial map."""
    model = Model(
        layers=SHAPE.layers, experts=SHAPE.experts, ranks=SHAPE.ranks, sub_windows=4, period=PERIOD
    )
    table: Table = np.tile(np.arange(SHAPE.slots) % SHAPE.experts, (SHAPE.layers, 1))
    for number, (window, later) in enumerate(pairwise(windows(model, seed, WINDOWS + 1))):
        began = time.thread_time()
        after = rival(window.counts, table)
        seconds = time.thread_time() - began
        kind = "first" if number == 0 else "switch" if window.switched else "steady"
        yield {
            "kind": kind,
            "seconds": seconds,
            "moved": copied_fraction(table, after),
            "layers": int((table != after).any(axis=1).sum()),
            "planned": even_split(window.load, after),
            "next": even_split(later.load, after),
            "static": static_dispatch(later.load, after),
            # Where the next window is of another kind, nobody could know.
            "same_traffic": not later.switched,
        }
        table = after


def row(name: str, trials: list[list[dict[str, Any]]]) -> Row:
    """One line of the table: median, least and most of seeds."""

    def of(kind: str, figure: str) -> list[float]:
        chosen = ([each[figure] for each in one if each["kind"] == kind] for one in trials)
        return spread(statistics.mean(values) for values in chosen)

    def before_same_traffic(figure: str) -> list[float]:
        return spread(
            statistics.mean(each[figure] for each in one if each["same_traffic"]) for one in trials
        )

    return {
        "policy": name,
        "first": of("first", "moved"),
        "steady": of("steady", "moved"),
        "switch": of("switch", "moved"),
        "all": spread(sum(each["moved"] for each in one) for one in trials),
        "layers": of("steady", "layers"),
        "planned": before_same_traffic("planned"),
        "next": before_same_traffic("next"),
        "static": before_same_traffic("static"),
        "seconds": spread(statistics.median(each["seconds"] for each in one) for one in trials),
    }


def main() -> None:
    """Measure, keep and show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed; nothing is kept")
    options = parser.parse_args()
    parallel = SimpleNamespace(ep_size=SHAPE.ranks, nnodes=NODES)
    with (
        patch.object(expert_location, "get_parallel", lambda: parallel),
        patch.object(expert_location, "_prefer_same_node_experts", lambda: True),
    ):
        seeds = range(1 if options.quick else SEEDS)
        rows = [
            row(name, [list(trial(rival, seed)) for seed in seeds])
            for name, rival in RIVALS.items()
        ]
    one_node, policy = rows[0], rows[2]
    figures = {
        "moved": [p / s for p, s in zip(policy["all"], one_node["all"], strict=True)],
        "next": [p / s for p, s in zip(policy["next"], one_node["next"], strict=True)],
        "static": [p / s for p, s in zip(policy["static"], one_node["static"], strict=True)],
    }
    show("sglang_policy", figures, {"policies": rows})
    if not options.quick:
        command = ["python", "benchmarks/sglang_policy.py"]
        save("sglang_policy", command, figures, {"policies": rows})


if __name__ == "__main__":
    main()
