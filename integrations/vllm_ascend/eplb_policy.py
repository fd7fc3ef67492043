"""Counters of a planner that runs in a process of its own, seen by the worker that started it.

Our placement policy behind the interface of vllm-ascend's policies; knows nothing else of it.

vllm-ascend sends a rank's tokens of an expert to one replica, and ranks to replicas in turn, so
plans are made for even shares. Each rank plans for itself, in a process of its own, and nobody
compares: plans are made of integers, so that they are equal.

Our placement policy in vllm-ascend's own balancer, and in vLLM's, where a release uses that.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from multiprocessing.sharedctypes import RawValue
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.balancer.compat.input_arrays import ArrayInput
from equipoise.balancer.compat.vllm_ascend import InstalledLoad, parse_installed_load
from equipoise.hal.errors import PlacementError
from equipoise.integrations.vllm.eplb import install
from equipoise.integrations.vllm.eplb.policy_plan import PolicyPlan, plan_placement
from equipoise.integrations.vllm.patching import Patch, apply_patches, undo_patches
from equipoise.integrations.vllm.settings import EplbPolicySettings

POLICY_COUNTERS = "eplb_policy_calls", "eplb_policy_moved_slots", "eplb_policy_failures"
"""As in `equipoise.integrations.vllm.counters`."""


class SharedCounters:
    """Integers that only grow, in memory that a forked process shares.

    One process adds, any may read. Without locks: a planner that is killed would keep one.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Any] = {name: RawValue("q", 0) for name in POLICY_COUNTERS}

    def add(self, name: str, count: int = 1) -> None:
        """Raises `KeyError` for a name that is not one of `NAMES`."""
        self._counts[name].value += count

    def read(self) -> Mapping[str, int]:
        """All of them, now."""
        return {name: int(count.value) for name, count in self._counts.items()}


LOG = logging.getLogger("vllm.equipoise")
RebalanceResult = tuple[int, npt.NDArray[np.int64], Any]
"""Whether the table changed; the layers, those first that are relieved most; the new table."""


class AscendEplbPolicy:
    """What vllm-ascend's factory of policies hands out.

    An exception in our planner is logged, counted (`eplb_policy_failures`) and answered with the
    table
    as it is: vllm-ascend's planner ends for good at the first one, and its workers then wait for
    it without a bound.

    Args:
        settings: how far to go.
        counters: counts; shared with the worker.
        level: of the line that each plan writes.
    """

    def __init__(
        self, settings: EplbPolicySettings, counters: SharedCounters, level: int = logging.INFO
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._level = level

    def rebalance_experts(
        self, current_expert_table: ArrayInput, expert_workload: ArrayInput
    ) -> RebalanceResult:
        """Where the replicas of experts go.

        Args:
            current_expert_table: (layers, ranks, slots of a rank), the expert in each slot.
            expert_workload: likewise, the tokens that the slot took; -1 where nothing is known.
                One more dimension in front, of stages, is summed.

        Returns:
            The new table is int64 (layers, ranks, slots of a rank): an expert that stays on a rank
            stays in its slot.
        """
        self._counters.add("eplb_policy_calls")
        try:
            return self._plan(parse_installed_load(current_expert_table, expert_workload))
        except Exception:
            # Whatever it is: see above.
            self._counters.add("eplb_policy_failures")
            LOG.exception("equipoise eplb_policy failed; what is installed stays")
            return 0, np.arange(len(current_expert_table)), current_expert_table  # type: ignore[arg-type]

    def set_new_ep_size(self, new_ep_size: int) -> None:
        """Refuse with `PlacementError`: it is called before the group grows or shrinks."""
        raise PlacementError(f"a group that changes to {new_ep_size} ranks is not planned here")

    def _plan(self, given: InstalledLoad) -> RebalanceResult:
        found = plan_placement(given.load, given.shape, given.installed, self._settings)
        self._log_plan(found, given)
        relieved = given.layers_by_relief(found.placement.astype(np.int32))
        return int(found.moved_slots > 0), relieved, given.to_tables(found.placement)

    def _log_plan(self, found: PolicyPlan, given: InstalledLoad) -> None:
        self._counters.add("eplb_policy_moved_slots", found.moved_slots)
        LOG.log(
            self._level,
            "equipoise eplb_policy: %d of %d layers change, %d of %d slots move, "
            "balancedness %.4f -> %.4f predicted",
            found.changed_layers,
            given.shape.layers,
            found.moved_slots,
            given.installed.size,
            found.balancedness_before,
            found.balancedness_after,
        )


POLICY_FACTORY = "vllm_ascend.eplb.core.policy.policy_factory"


@contextmanager
def install_policy(settings: EplbPolicySettings, counters: SharedCounters) -> Iterator[None]:
    """Have runners that are made within the context planned for by us.

    A runner asks the factory once, and forks the process that plans; so this comes before the
    runner, and before any thread of ours.
    """
    patches = (Patch(POLICY_FACTORY, "PolicyFactory.generate_policy", _ours(settings, counters)),)
    with install.install_policy(settings):
        undo_patches(patches)  # a worker before this one in the process may not have been shut down
        apply_patches(patches)
        try:
            yield
        finally:
            undo_patches(patches)


def _ours(settings: EplbPolicySettings, counters: SharedCounters) -> Callable[[Any], Any]:
    def make(stock: Callable[[int], Any]) -> Callable[[int], AscendEplbPolicy]:
        @wraps(stock)
        def generate_policy(policy_type: int) -> AscendEplbPolicy:
            level = _level()
            LOG.log(
                level, "equipoise eplb_policy plans in place of eplb_policy_type %s", policy_type
            )
            return AscendEplbPolicy(settings, counters, level)

        return generate_policy

    return make


def _level() -> int:
    """All ranks of a group plan the same: the first tells it."""
    from vllm.distributed.parallel_state import get_ep_group

    try:
        first = get_ep_group().rank_in_group == 0
    except AssertionError:  # no group: called by hand
        first = True
    return logging.INFO if first else logging.DEBUG
