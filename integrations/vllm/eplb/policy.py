"""A placement policy for vLLM's balancer that starts from what is installed.

vLLM divides an expert's tokens evenly among its replicas, so plans are made for even shares. Nodes
and groups of experts change nothing: what they would cost in balance only group-limited routing
gives back.
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
    """A class without state, as the engine wants one.

    Without state also because ranks plan for themselves and have to agree: one that joined a
    minute ago knows no window but the one it is given. Models that share it are told apart by what
    they pass.

    Where the old map has empty slots (-1), lacks an expert, or has another number of slots, as
    while the group grows or shrinks, the stock policy plans, and a line in the log says so.

    An exception in our planner is logged, counted (`eplb_policy_failures`) and answered with the
    old map, or with the stock policy's plan where there is none: the engine calls this on a thread
    which it would end, and no rebalance would ever follow. The plans of ranks stay equal where all
    fail alike, which holds for whatever the arguments cause.

    Attributes:
        settings: how far to go.
        stock: plans where no plan of ours can start from what is installed.
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
        """Where the replicas of experts go.

        Args:
            weight: (layers, experts), tokens of each expert in the window.
            num_replicas: slots of a layer, a multiple of `num_ranks`.
            num_groups: for the stock policy.
            num_nodes: for the stock policy.
            num_ranks: ranks.
            old_global_expert_indices: (layers, slots), what is in the slots now.

        Returns:
            The expert in each slot, int64 (layers, slots), on the CPU.
        """
        COUNTERS.add("eplb_policy_calls")
        old = old_global_expert_indices
        try:
            ours = _planned(weight, old, num_replicas, num_ranks, cls.settings)
        except Exception:
            # Whatever it is: see above.
            COUNTERS.add("eplb_policy_failures")
            LOG.exception("equipoise eplb_policy failed; what is installed stays")
            ours = _whole(old, num_replicas)
        if ours is not None:
            return ours
        theirs: Tensor = cls.stock.rebalance_experts(
            weight, num_replicas, num_groups, num_nodes, num_ranks, old
        )
        return theirs


def policy_class(
    settings: EplbPolicySettings, stock: PolicyClass = DefaultEplbPolicy
) -> PolicyClass:
    """`IncrementalEplbPolicy` with these attributes."""

    class Policy(IncrementalEplbPolicy):
        pass

    Policy.settings, Policy.stock = settings, stock
    return Policy


def _planned(
    weight: Tensor, old: Tensor | None, slots: int, ranks: int, settings: EplbPolicySettings
) -> Tensor | None:
    """None where no plan of ours can start from the old map."""
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
    _tell(new_plan, shape)
    return torch.from_numpy(new_plan.placement)


def _whole(old: Tensor | None, slots: int) -> Tensor | None:
    """The old map, if it can stay."""
    if old is None or old.shape[-1] != slots or bool((old < 0).any()):
        return None
    return old.to(device="cpu", dtype=torch.int64)


def _tell(policy_plan: PolicyPlan, shape: ExpertShape) -> None:
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
    """All ranks of a group plan the same: the first tells it."""
    try:
        first = get_ep_group().rank_in_group == 0
    except AssertionError:  # no group: called by hand
        first = True
    return logging.INFO if first else logging.DEBUG
