"""A placement policy for vLLM's EPLB that starts from the current placement, to move little.

vLLM splits an expert's tokens evenly among its replicas, so plans assume an even split. Nodes and
groups of experts are ignored: respecting them costs balance, which pays with group-limited routing
only.
"""

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.distributed.eplb.policy import AbstractEplbPolicy, DefaultEplbPolicy
from vllm.distributed.parallel_state import get_ep_group

from equipoise.balancer.compat.input_arrays import integer_counts, integer_ids
from equipoise.balancer.experts.placement import ExpertShape
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.eplb.policy_plan import PolicyPlan, plan_placement, valid_placement
from equipoise.integrations.vllm.settings import EplbPolicySettings

LOG = logging.getLogger("vllm.equipoise")
STOCK_PLANS_MESSAGE = (
    "equipoise eplb_policy: the stock policy plans: the old map %s has empty slots, lacks experts, "
    "or is not of %d layers and %d slots"
)
PolicyClass = type[AbstractEplbPolicy]


class IncrementalEplbPolicy(AbstractEplbPolicy):  # type: ignore[misc]
    """A policy without state, as vLLM's interface requires.

    Ranks plan independently and have to agree, so a plan may depend on the arguments only: a rank
    that joined a minute ago has no earlier window.

    If the old map has empty slots (-1), lacks an expert, or has another number of slots, as while
    the group grows or shrinks, the stock policy plans, and a log line says so.

    An exception in our planner is logged, counted (`eplb_policy_failures`) and answered with the
    old map, or with the stock policy's plan if there is none: vLLM calls this on a thread that the
    exception would end, and rebalancing with it. Ranks still agree if all fail alike, which holds
    for errors that the arguments cause.

    Attributes:
        settings: of `eplb_policy`.
        stock: the policy that plans if ours cannot start from the old map.
    """

    settings: ClassVar[EplbPolicySettings] = EplbPolicySettings()
    stock: ClassVar[PolicyClass] = DefaultEplbPolicy

    @classmethod
    def rebalance_experts(
        cls,
        weight: Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: Tensor | None = None,
    ) -> Tensor:
        """Return a new placement.

        Args:
            weight: (layers, experts), tokens of each expert in the window.
            num_replicas: slots of a layer, a multiple of `num_ranks`.
            num_groups: for the stock policy.
            num_nodes: for the stock policy.
            num_ranks: ranks.
            old_global_expert_indices: (layers, slots), the expert in each slot now.

        Returns:
            The expert in each slot, int64 (layers, slots), on the CPU.
        """
        COUNTERS.add("eplb_policy_calls")
        old = old_global_expert_indices
        try:
            incremental_map = _plan(weight, old, num_replicas, num_ranks, cls.settings)
        except Exception:
            # Any exception: see the class docstring.
            COUNTERS.add("eplb_policy_failures")
            LOG.exception("equipoise eplb_policy failed; the current placement stays")
            incremental_map = _reusable_map(old, num_replicas)
        if incremental_map is not None:
            return incremental_map
        stock_map: Tensor = cls.stock.rebalance_experts(
            weight, num_replicas, num_groups, num_nodes, num_ranks, old
        )
        return stock_map


def policy_class(
    settings: EplbPolicySettings, stock: PolicyClass = DefaultEplbPolicy
) -> PolicyClass:
    """`IncrementalEplbPolicy` with these attributes."""

    class Policy(IncrementalEplbPolicy):
        pass

    Policy.settings, Policy.stock = settings, stock
    return Policy


def _plan(
    weight: Tensor, old: Tensor | None, slots: int, ranks: int, settings: EplbPolicySettings
) -> Tensor | None:
    """Plan from the old map; None if it is not a valid placement."""
    load = integer_counts(weight)
    layers, experts = load.shape
    shape = ExpertShape(layers, experts, slots, ranks)
    installed = None
    if old is not None:
        installed = valid_placement(integer_ids(old, "old_global_expert_indices"), shape)
        if installed is None:
            facts = tuple(old.shape), shape.layers, shape.slots
            LOG.log(_level(), STOCK_PLANS_MESSAGE, *facts)
            return None
    new_plan = plan_placement(load, shape, installed, settings)
    _log_plan(new_plan, shape)
    return torch.from_numpy(new_plan.placement)


def _reusable_map(old: Tensor | None, slots: int) -> Tensor | None:
    """Return the old map if it is valid as a new one."""
    if old is None or old.shape[-1] != slots or bool((old < 0).any()):
        return None
    return old.to(device="cpu", dtype=torch.int64)


def _log_plan(policy_plan: PolicyPlan, shape: ExpertShape) -> None:
    COUNTERS.add("eplb_policy_moved_slots", policy_plan.moved_slots)
    before = (
        "none"
        if policy_plan.balancedness_before is None
        else f"{policy_plan.balancedness_before:.4f}"
    )
    facts: tuple[Any, ...] = (
        policy_plan.changed_layers,
        shape.layers,
        policy_plan.moved_slots,
        shape.layers * shape.slots,
    )
    LOG.log(
        _level(),
        "equipoise eplb_policy: %d of %d layers change, %d of %d slots move, "
        "balancedness %s -> %.4f predicted",
        *facts,
        before,
        policy_plan.balancedness_after,
    )


def _level() -> int:
    """Return the log level: all ranks of a group plan the same, so only the first logs at INFO."""
    try:
        first = get_ep_group().rank_in_group == 0
    except AssertionError:  # no group: called outside of an engine
        first = True
    return logging.INFO if first else logging.DEBUG
