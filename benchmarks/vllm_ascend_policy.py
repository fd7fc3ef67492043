"""Placement in vllm-ascend: what its own policies move, what ours does, and how long a plan takes.

    PYTHONPATH=tests:tests/simulators .tox/engines/bin/python benchmarks/vllm_ascend_policy.py
    ... benchmarks/vllm_ascend_policy.py --quick    one seed, for a look; nothing is kept

vllm-ascend's policies and our `AscendEplbPolicy`, which takes their place in its factory, get the
same windows of DeepSeek-V3's size, as tokens by slot; the kind of traffic switches twice. Each
starts from vllm-ascend's own first placement and then from what it had planned itself. *Moved* is
what ranks have to fetch from others, as part of all slots. Imbalance is max/mean - 1 of the ranks,
mean over layers, with an expert's tokens divided evenly among its slots.

Writes benchmarks/results/vllm_ascend_policy.json; `python benchmarks/report.py` shows it.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lib.loads import Counts
from lib.policy_trials import SHAPE, Rival, Table, copies, ratio, row, trial
from lib.results import save
from report import show
from vllm_ascend_cpu import stand_ins
from vllm_ascend_cpu.fetch import FOLDER

from equipoise.integrations.vllm.settings import EplbPolicySettings
from equipoise.integrations.vllm_ascend.eplb_policy import AscendEplbPolicy, SharedCounters

sys.path.insert(0, str(FOLDER))
stand_ins.install()
from vllm_ascend.eplb.core.eplb_utils import generate_global_placement  # noqa: E402
from vllm_ascend.eplb.core.policy.policy_factory import PolicyFactory  # noqa: E402

SHAPED = SHAPE.layers, SHAPE.ranks, SHAPE.slots_per_rank
SWIFT, DEFAULT, FLASH = "type 2, its default", "type 1", "type 3"
OURS = "`eplb_policy`"
POLICIES: dict[str, Callable[[], Any]] = {
    SWIFT: lambda: PolicyFactory.generate_policy(2),
    DEFAULT: lambda: PolicyFactory.generate_policy(1),
    FLASH: lambda: PolicyFactory.generate_policy(3),
    OURS: lambda: AscendEplbPolicy(EplbPolicySettings(), SharedCounters()),
}
"""By name, made anew for each seed: some keep what they have seen."""
SEEDS = (0, 1, 2)
"""On some loads of others vllm-ascend's type 1 ends with an IndexError."""
STAGED = (FLASH,)
"""Those to which vllm-ascend gives the sub-windows of a window one by one."""


def rival(name: str) -> Rival:
    """The policy, called as vllm-ascend's planner calls it."""
    policy = POLICIES[name]()

    def plan(steps: Counts, installed: Table) -> Table:
        loads = steps if name in STAGED else steps.sum(axis=0, keepdims=True)
        by_slot = np.stack(
            [np.take_along_axis(load // copies(installed), installed, axis=1) for load in loads]
        ).reshape(-1, *SHAPED)
        workload = torch.from_numpy(by_slot if name in STAGED else by_slot[0])
        tables = torch.from_numpy(installed.reshape(SHAPED).copy())
        _, _, after = policy.rebalance_experts(tables, workload)
        table: Table = np.asarray(after, dtype=np.int64).reshape(SHAPE.layers, SHAPE.slots)
        return table

    return plan


def main() -> None:
    """Measure, keep and show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed; nothing is kept")
    options = parser.parse_args()
    placed = generate_global_placement(SHAPE.experts, SHAPE.ranks, SHAPE.slots - SHAPE.experts, 0)
    first = np.tile(placed.numpy().reshape(1, -1), (SHAPE.layers, 1)).astype(np.int64)
    seeds = SEEDS[:1] if options.quick else SEEDS
    trials = {
        name: [list(trial(rival(name), seed, first, {})) for seed in seeds] for name in POLICIES
    }
    figures = {
        figure: ratio(trials[OURS], trials[SWIFT], figure)
        for figure in ("moved", "next", "seconds")
    }
    tables = {"policies": [row(name, each) for name, each in trials.items()]}
    show("vllm_ascend_policy", figures, tables)
    if not options.quick:
        save("vllm_ascend_policy", ["python", "benchmarks/vllm_ascend_policy.py"], figures, tables)


if __name__ == "__main__":
    main()
