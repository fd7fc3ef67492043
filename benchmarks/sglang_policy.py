"""Placement in SGLang: what its own algorithm moves, what ours does, and how level it is served.

    PYTHONPATH=tests:tests/simulators .tox/engines/bin/python benchmarks/sglang_policy.py
    ... benchmarks/sglang_policy.py --quick    one seed, for a look; nothing is kept

SGLang's `rebalance_experts` (`--eplb-algorithm auto`) and our plugin's plan, from a window's steps
and what is left of earlier ones, get the same windows of DeepSeek-V3's size; the kind of traffic
switches twice. Each starts from SGLang's trivial map and then from what it had planned itself.
*Moved* is what ranks have to fetch from others, as part of all slots.

Imbalance is max/mean - 1 of the ranks, mean over layers. *Planned* is on the window of the plan,
*next* on the window after it: both with an expert's tokens divided evenly among its slots, which is
what SGLang's dispatch `dynamic` draws. *Static* is that next window by SGLang's dispatch `static`,
where a rank sends an expert's tokens to one slot, its own or one of its node if there is one: by
SGLang's own table, with as many tokens on every rank.

Writes benchmarks/results/sglang_policy.json; `python benchmarks/report.py` shows it.
"""

import argparse
import json
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from lib.loads import Counts
from lib.policy_trials import SEEDS, SHAPE, Rival, Table, imbalance, ratio, row, trial
from lib.results import save
from report import show
from sglang_cpu import stand_ins

from equipoise.balancer.experts.placement import logical_maps
from equipoise.integrations.sglang.load_history import LoadHistory
from equipoise.integrations.sglang.plugin import policy_settings
from equipoise.integrations.vllm.eplb.policy_plan import plan_placement

stand_ins.install()
from sglang.srt.eplb import expert_location  # noqa: E402
from sglang.srt.eplb.eplb_algorithms import compute_algorithm, rebalance_experts  # noqa: E402

NODES, GROUPS = 4, 8
"""DeepSeek-V3 has eight groups of experts, which SGLang ties to nodes."""


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


def ours(**options: float) -> Rival:
    """The plugin's plan with these options, and its own history."""
    settings = policy_settings(json.dumps({"eplb_policy": options}))
    assert settings is not None
    history = LoadHistory()

    def plan(steps: Counts, installed: Table) -> Table:
        earlier = history.predictive(steps)
        history.add(steps)
        return plan_placement(steps, SHAPE, installed.astype(np.int32), settings, earlier).placement

    return plan


STOCK, OURS = "SGLang, one node", "`eplb_policy`"
RIVALS: dict[str, Callable[[], Rival]] = {
    STOCK: lambda: stock(1),
    "SGLang, four nodes": lambda: stock(NODES),
    OURS: ours,
    "`eplb_policy`, `min_gain` 0.05": lambda: ours(min_gain=0.05),
}
"""By name, made anew for each seed."""


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
        seeds = SEEDS[:1] if options.quick else SEEDS
        first = np.tile(np.arange(SHAPE.slots) % SHAPE.experts, (SHAPE.layers, 1))
        static = {"static": static_dispatch}
        trials = {
            name: [list(trial(rival(), seed, first, static)) for seed in seeds]
            for name, rival in RIVALS.items()
        }
    figures = {
        figure: ratio(trials[OURS], trials[STOCK], figure) for figure in ("moved", "next", "static")
    }
    rows = [row(name, each, *static) for name, each in trials.items()]
    show("sglang_policy", figures, {"policies": rows})
    if not options.quick:
        command = ["python", "benchmarks/sglang_policy.py"]
        save("sglang_policy", command, figures, {"policies": rows})


if __name__ == "__main__":
    main()
