"""Placement in SGLang: what its own algorithm moves, what ours does, and how level it is served.

    PYTHONPATH=tests:tests/simulators .tox/engines/bin/python benchmarks/sglang_policy.py
    ... benchmarks/sglang_policy.py --quick    one seed, for a look; nothing is kept

SGLang's `rebalance_experts` (`--eplb-algorithm auto`) and our plugin's plan, from a window's steps
and what is left of earlier ones, get the same windows of DeepSeek-V3's size; the kind of traffic
switches twice. Each starts from SGLang's trivial map and then from what it had planned itself.
*Moved* is what ranks have to fetch from others, as part of all slots.

The same is played on a recorded load (tests/simulators/sglang_cpu/recorded_load.py): what the
shipped model routed over three texts, 6 layers of 32 experts in 40 slots, in windows of 40 and of
100 steps.

Imbalance is max/mean - 1 of the ranks, mean over layers. *Planned* is on the window of the plan,
with an expert's tokens divided evenly among its slots. *Dynamic* and *static* are on the window
after it, by SGLang's dispatch of that name and the table that it would have looked up: SGLang's
own, or the plugin's, which is filled by the load of the plan; with as many tokens on every rank.

Writes benchmarks/results/sglang_policy.json; `python benchmarks/report.py` shows it.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from lib.loads import Counts
from lib.policy_trials import (
    SEEDS,
    SHAPE,
    Table,
    copied_fraction,
    copies,
    imbalance,
    ratio,
    row,
    trial,
)
from lib.results import save, spread
from report import show
from sglang_cpu import stand_ins
from sglang_cpu.recorded_load import STEPS, TEXTS, recorded_windows

from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, logical_maps
from equipoise.integrations.sglang.eplb_policy import dispatch_table
from equipoise.integrations.sglang.load_history import LoadHistory
from equipoise.integrations.sglang.settings import policy_settings
from equipoise.integrations.vllm.eplb.policy_plan import plan_placement

stand_ins.install()
from sglang.srt.eplb import expert_location  # noqa: E402
from sglang.srt.eplb.eplb_algorithms import compute_algorithm, rebalance_experts  # noqa: E402

Parts = npt.NDArray[np.float64]
NODES, GROUPS = 4, 8
"""DeepSeek-V3 has eight groups of experts, which SGLang ties to nodes."""


class Stock:
    """SGLang's algorithm for so many nodes, which does not look at what is installed."""

    def __init__(self, nodes: int, shape: ExpertShape = SHAPE) -> None:
        self._algorithm = compute_algorithm(
            raw_algorithm="auto", num_groups=GROUPS, num_nodes=nodes
        )
        self._nodes, self._shape = nodes, shape

    def plan(self, steps: Counts, installed: Table) -> Table:
        """Return the next table."""
        placement, _, _ = rebalance_experts(
            tokens_per_expert=torch.from_numpy(steps),
            num_physical_experts=self._shape.slots,
            num_local_physical_experts=self._shape.slots_per_rank,
            num_groups=GROUPS,
            num_nodes=self._nodes,
            algorithm=self._algorithm,
        )
        table: Table = placement.numpy().astype(np.int64)
        return table

    def shares(self, dispatch: str, table: Table) -> Parts:
        """Return the part of its expert's tokens that each slot gets, (layers, slots)."""
        logical = logical_maps(table, self._shape.experts).logical_to_physical
        if dispatch == "dynamic":
            return 1 / np.take_along_axis(copies(table, self._shape), table, axis=1)
        chosen = expert_location.compute_logical_to_rank_dispatch_physical_map(
            logical_to_all_physical_map=torch.from_numpy(logical),
            ep_size=self._shape.ranks,
            num_physical_experts=self._shape.slots,
            ep_rank=slice(None),  # of all ranks
        ).numpy()
        parts = np.zeros((self._shape.layers, self._shape.slots))
        np.add.at(
            parts, (np.arange(self._shape.layers)[None, :, None], chosen), 1 / self._shape.ranks
        )
        return parts


class Plugin:
    """The plugin's plan with these options, its own history, and its tables of dispatch."""

    def __init__(self, shape: ExpertShape = SHAPE, nodes: int = NODES, **options: float) -> None:
        settings = policy_settings(json.dumps({"eplb_policy": options}))
        assert settings is not None
        self._settings, self._shape, self._nodes = settings, shape, nodes
        self._history = LoadHistory()
        self._load: Counts = np.zeros((shape.layers, shape.experts), np.int64)

    def plan(self, steps: Counts, installed: Table) -> Table:
        """Return the next table."""
        earlier = self._history.predictive(steps)
        self._history.add(steps)
        self._load = steps.sum(axis=0) + earlier
        return plan_placement(
            steps, self._shape, installed.astype(np.int32), self._settings, earlier
        ).placement

    def shares(self, dispatch: str, table: Table) -> Parts:
        """Return the part of its expert's tokens that each slot gets, (layers, slots)."""
        made = dispatch_table(dispatch, self._load, table, self._shape, self._nodes)
        return made.shares / SHARE_ONE


STOCK, OURS = "SGLang, one node", "`eplb_policy`"
RIVALS: dict[str, Callable[[], Stock | Plugin]] = {
    STOCK: lambda: Stock(1),
    "SGLang, four nodes": lambda: Stock(NODES),
    OURS: Plugin,
    "`eplb_policy`, `min_gain` 0.05": lambda: Plugin(min_gain=0.05),
}
"""By name, made anew for each seed."""
DISPATCHES = "dynamic", "static"


def dispatched(
    rival: Stock | Plugin, dispatch: str, load: Counts, table: Table, shape: ExpertShape = SHAPE
) -> float:
    """Imbalance of a load by a rival's table of SGLang's dispatch."""
    rows = np.take_along_axis(load, table, axis=1)
    return imbalance(rows * rival.shares(dispatch, table), shape)


def play(rival: Stock | Plugin, seed: int) -> list[dict[str, Any]]:
    """Every rebalance of a seed."""
    first = np.tile(np.arange(SHAPE.slots) % SHAPE.experts, (SHAPE.layers, 1))
    figures = {dispatch: partial(dispatched, rival, dispatch) for dispatch in DISPATCHES}
    return list(trial(rival.plan, seed, first, figures))


def play_recorded(rival: Stock | Plugin, shape: ExpertShape, steps: int) -> dict[str, float]:
    """Sum of what is moved and mean imbalance over the windows of the recorded load."""
    windows = recorded_windows(steps)
    table: Table = np.tile(np.arange(shape.slots) % shape.experts, (shape.layers, 1))
    moved, figures = 0.0, []
    text = len(windows) // TEXTS
    for number, window in enumerate(windows):
        after = rival.plan(window, table)
        moved += copied_fraction(table, after, shape)
        table = after
        if (number + 1) % text:  # else the next window is of another text
            later = windows[number + 1].sum(axis=0)
            figures.append([dispatched(rival, each, later, table, shape) for each in DISPATCHES])
    return {"moved": moved, **dict(zip(DISPATCHES, np.mean(figures, axis=0), strict=True))}


def recorded_row(ranks: int, steps: int) -> dict[str, Any]:
    """The plugin over SGLang on the recorded load: a row of the table."""
    shape = ExpertShape(layers=6, experts=32, slots=40, ranks=ranks)
    parallel = SimpleNamespace(ep_size=ranks, nnodes=1)
    with patch.object(expert_location, "get_parallel", lambda: parallel):
        stock, ours = (
            play_recorded(rival, shape, steps) for rival in (Stock(1, shape), Plugin(shape, 1))
        )
    ratios = {figure: ours[figure] / stock[figure] for figure in ("moved", *DISPATCHES)}
    rebalances = STEPS // steps
    return {"ranks": ranks, "steps": steps, "rebalances": rebalances, **ratios}


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
        recorded = [recorded_row(ranks, steps) for steps in (40, 100) for ranks in (2, 4, 8)]
        trials = {name: [play(rival(), seed) for seed in seeds] for name, rival in RIVALS.items()}
    figures = {
        figure: ratio(trials[OURS], trials[STOCK], figure) for figure in ("moved", *DISPATCHES)
    }
    rows = [row(name, each, *DISPATCHES) for name, each in trials.items()]
    tables = {"policies": rows, "recorded": recorded}
    figures["recorded"] = spread([each["moved"] for each in recorded if each["steps"] == 40])
    show("sglang_policy", figures, tables)
    if not options.quick:
        command = ["python", "benchmarks/sglang_policy.py"]
        save("sglang_policy", command, figures, tables)


if __name__ == "__main__":
    main()
