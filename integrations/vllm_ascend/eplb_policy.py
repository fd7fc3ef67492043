"""Our placement policy in vllm-ascend's EPLB, and in vLLM's for releases that use that.

vllm-ascend sends all of a rank's tokens of an expert to one replica, and assigns ranks to replicas
in turn, so plans assume an even split. Each rank plans for itself in a process of its own, and
plans are not compared: they are computed with integers, so that they are equal.
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
"""Names as in `equipoise.integrations.vllm.counters`."""


class SharedCounters:
    """Monotonic counters in memory that a forked process shares.

    One process adds, any may read. There is no lock, since a planner that is killed would hold it.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Any] = {name: RawValue("q", 0) for name in POLICY_COUNTERS}

    def add(self, name: str, count: int = 1) -> None:
        """Add to a counter. Raises `KeyError` for a name that is not in `POLICY_COUNTERS`."""
        self._counts[name].value += count

    def read(self) -> Mapping[str, int]:
        """Return all counters."""
        return {name: int(count.value) for name, count in self._counts.items()}


LOG = logging.getLogger("vllm.equipoise")
RebalanceResult = tuple[int, npt.NDArray[np.int64], Any]
"""1 if the table changed, else 0; the layers, most relieved first; the new table."""


class AscendEplbPolicy:
    """The policy that vllm-ascend's factory returns.

    An exception in our planner is logged, counted (`eplb_policy_failures`)
    and answered with the current table: otherwise vllm-ascend's planner process would end, and its
    workers would wait for it without a bound.

    Args:
        settings: of `eplb_policy`.
        counters: shared with the worker.
        level: log level of the line per plan.
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
        """Return a new placement.

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
            # Any exception: see the class docstring.
            self._counters.add("eplb_policy_failures")
            LOG.exception("equipoise eplb_policy failed; the current placement stays")
            return 0, np.arange(len(current_expert_table)), current_expert_table  # type: ignore[arg-type]

    def set_new_ep_size(self, new_ep_size: int) -> None:
        """Raise `PlacementError`: called before the group grows or shrinks, which is
        unsupported."""
        raise PlacementError(f"a group that changes to {new_ep_size} ranks is not supported")

    def _plan(self, installed_load: InstalledLoad) -> RebalanceResult:
        policy_plan = plan_placement(
            installed_load.load, installed_load.shape, installed_load.installed, self._settings
        )
        self._log_plan(policy_plan, installed_load)
        relieved = installed_load.layers_by_relief(policy_plan.placement.astype(np.int32))
        return (
            int(policy_plan.moved_slots > 0),
            relieved,
            installed_load.to_tables(policy_plan.placement),
        )

    def _log_plan(self, policy_plan: PolicyPlan, installed_load: InstalledLoad) -> None:
        self._counters.add("eplb_policy_moved_slots", policy_plan.moved_slots)
        LOG.log(
            self._level,
            "equipoise eplb_policy: %d of %d layers change, %d of %d slots move, "
            "balancedness %.4f -> %.4f predicted",
            policy_plan.changed_layers,
            installed_load.shape.layers,
            policy_plan.moved_slots,
            installed_load.installed.size,
            policy_plan.balancedness_before,
            policy_plan.balancedness_after,
        )


POLICY_FACTORY = "vllm_ascend.eplb.core.policy.policy_factory"


@contextmanager
def install_policy(settings: EplbPolicySettings, counters: SharedCounters) -> Iterator[None]:
    """Use our policy for model runners that are created in the context.

    A runner calls the factory once and forks the planner process. So this has to come before the
    runner, and before any thread of ours, which a fork would not copy.
    """
    patches = (
        Patch(
            POLICY_FACTORY,
            "PolicyFactory.generate_policy",
            _policy_factory_wrapper(settings, counters),
        ),
    )
    with install.install_policy(settings):
        undo_patches(patches)  # an earlier worker of this process may not have been shut down
        apply_patches(patches)
        try:
            yield
        finally:
            undo_patches(patches)


def _policy_factory_wrapper(
    settings: EplbPolicySettings, counters: SharedCounters
) -> Callable[[Any], Any]:
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
    """Return the log level: all ranks of a group plan the same, so only the first logs at INFO."""
    from vllm.distributed.parallel_state import get_ep_group

    try:
        first = get_ep_group().rank_in_group == 0
    except AssertionError:  # no group: called outside of an engine
        first = True
    return logging.INFO if first else logging.DEBUG
