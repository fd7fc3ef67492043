"""Our placement policy behind the interface of vllm-ascend's policies; knows nothing else of it.

vllm-ascend sends a rank's tokens of an expert to one replica, and ranks to replicas in turn, so
plans are made for even shares. Each rank plans for itself, in a process of its own, and nobody
compares: plans are made of integers, so that they are equal.
"""

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.balancer.compat.counts import Given
from equipoise.balancer.compat.vllm_ascend import Standing, standing
from equipoise.hal.errors import PlacementError
from equipoise.integrations.vllm.policy_plan import Proposal, propose
from equipoise.integrations.vllm.settings import PolicySettings
from equipoise.integrations.vllm_ascend.tally import Tally

LOG = logging.getLogger("vllm.equipoise")
Answer = tuple[int, npt.NDArray[np.int64], Any]
"""Whether the table changed; the layers, those first that are relieved most; the new table."""


class TablePolicy:
    """What vllm-ascend's factory of policies hands out.

    An exception in our planner is logged, counted (`policy_failures`) and answered with the table
    as it is: vllm-ascend's planner ends for good at the first one, and its workers then wait for
    it without a bound.

    Args:
        settings: how far to go.
        tally: counts; shared with the worker.
        level: of the line that each plan writes.
    """

    def __init__(self, settings: PolicySettings, tally: Tally, level: int = logging.INFO) -> None:
        self._settings = settings
        self._tally = tally
        self._level = level

    def rebalance_experts(self, current_expert_table: Given, expert_workload: Given) -> Answer:
        """Where the replicas of experts go.

        Args:
            current_expert_table: (layers, ranks, slots of a rank), the expert in each slot.
            expert_workload: likewise, the tokens that the slot took; -1 where nothing is known.
                One more dimension in front, of stages, is summed.

        Returns:
            The new table is int64 (layers, ranks, slots of a rank): an expert that stays on a rank
            stays in its slot.
        """
        self._tally.add("policy_calls")
        try:
            return self._planned(standing(current_expert_table, expert_workload))
        except Exception:
            # Whatever it is: see above.
            self._tally.add("policy_failures")
            LOG.exception("equipoise policy failed; what is installed stays")
            return 0, np.arange(len(current_expert_table)), current_expert_table  # type: ignore[arg-type]

    def set_new_ep_size(self, new_ep_size: int) -> None:
        """Refuse with `PlacementError`: it is called before the group grows or shrinks."""
        raise PlacementError(f"a group that changes to {new_ep_size} ranks is not planned here")

    def _planned(self, given: Standing) -> Answer:
        found = propose(given.load, given.shape, given.installed, self._settings)
        self._tell(found, given)
        relieved = given.relieved_by(found.placement.astype(np.int32))
        return int(found.moves > 0), relieved, given.tables(found.placement)

    def _tell(self, found: Proposal, given: Standing) -> None:
        self._tally.add("policy_moves", found.moves)
        LOG.log(
            self._level,
            "equipoise policy: %d of %d layers change, %d of %d slots move, "
            "balancedness %.4f -> %.4f predicted",
            found.layers,
            given.shape.layers,
            found.moves,
            given.installed.size,
            found.before,
            found.after,
        )
