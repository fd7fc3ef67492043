"""Cases for a pool of ranks: vllm-ascend's plans, dispatch and first placement, for many shapes."""

import logging
from typing import Any

import numpy as np
import torch
from vllm_ascend.ascend_config import EplbConfig
from vllm_ascend.eplb.core.eplb_utils import generate_global_placement, generate_log2phy_map
from vllm_ascend.eplb.core.eplb_worker import EplbWorker
from vllm_ascend.eplb.core.policy.policy_default_eplb import DefaultEplb
from vllm_ascend.eplb.core.policy.policy_swift_balancer import SwiftBalanceEplb

from equipoise.hal.communicator import Fabric
from vllm_ascend_cpu import stand_ins

Table = list[list[list[int]]]
"""[layers][ranks][slots of a rank], experts."""


def plans(
    fabric: Fabric, address: str, policy: str, problems: list[dict[str, Any]]
) -> list[Table | str]:
    """What is installed after each problem, or the name of the error that ends the planner.

    Args:
        fabric: of the case, of one rank.
        address: not used.
        policy: `swift` or `default`.
        problems: `installed` and `load`, both [layers][ranks][slots of a rank].
    """
    # The planner tells nodes by the NPUs of a machine, and does nothing with them by default.
    stand_ins.install().device_count.return_value = 8
    planner = SwiftBalanceEplb() if policy == "swift" else DefaultEplb()
    return [_plan(planner, each) for each in problems]


def _plan(planner: Any, problem: dict[str, Any]) -> Table | str:
    """As `EplbWorker.do_update`: through its maps and its check."""
    # Its constructor starts what plans need nothing of.
    worker = object.__new__(EplbWorker)
    tables = torch.tensor(problem["installed"])
    maps = worker.local2global(tables)
    old = worker.global2local(maps, tables.shape[2])
    logging.disable(logging.ERROR)  # of the check, which says so where it leaves a layer
    try:
        with np.errstate(all="ignore"):
            _, _, planned = planner.rebalance_experts(old, torch.tensor(problem["load"]))
        new = torch.as_tensor(planned)
        worker.check_expert_placement(old, new)
    except (ValueError, IndexError) as error:
        return type(error).__name__
    finally:
        logging.disable(logging.NOTSET)
    installed: Table = worker.global2local(worker.local2global(new), tables.shape[2]).tolist()
    return installed


def dispatch(fabric: Fabric, address: str, problems: list[dict[str, Any]]) -> list[list[list[int]]]:
    """For each problem the slot of every expert, by rank.

    Args:
        fabric: of the case, of one rank.
        address: not used.
        problems: `installed`, [ranks][slots of a rank], and `tp_size`.
    """
    answers = []
    for problem in problems:
        tables = torch.tensor([problem["installed"]])
        maps = object.__new__(EplbWorker).local2global(tables)[0]
        ranks = range(tables.shape[1])
        tp_size = problem["tp_size"]
        answers.append([generate_log2phy_map(maps, rank, tp_size).tolist() for rank in ranks])
    return answers


def first_placements(
    fabric: Fabric, address: str, shapes: list[list[int]]
) -> list[list[list[int]]]:
    """The table, [ranks][slots of a rank], of each shape: experts, ranks, redundant slots."""
    return [generate_global_placement(*shape, 0).tolist() for shape in shapes]


def defaults(fabric: Fabric, address: str) -> dict[str, Any]:
    """Of vllm-ascend's settings."""
    return dict(EplbConfig().config)
