"""`eplb_policy` of SGLang: its rebalances start from the installed placement.

SGLang plans each rebalance from scratch, so that nearly every slot gets another expert. These hooks
around its `EPLBManager` plan from the placement that is installed, and leave out layers that do not
change; its recorder, its condition for a rebalance and its transfer of weights stay.

All ranks plan for themselves, from counts that SGLang has summed over ranks and with integers, so
all get the same. An exception is raised: a rank that fell back alone would serve another placement.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from equipoise.balancer.compat.input_arrays import integer_counts, integer_ids
from equipoise.balancer.experts.placement import ExpertShape, logical_maps
from equipoise.hal.errors import IntegrationError
from equipoise.integrations.sglang.load_history import LoadHistory
from equipoise.integrations.vllm.eplb.policy_plan import PolicyPlan, plan_placement, valid_placement
from equipoise.integrations.vllm.settings import EplbPolicySettings

LOG = logging.getLogger("sglang.srt.equipoise")
"""A child of SGLang's logger, whose format and level it inherits."""
CHANGED_LAYERS = "equipoise_changed_layers"
"""Attribute of a manager between its plan and its transfer."""
LOAD_HISTORY = "equipoise_load_history"
"""Attribute of a manager, a `LoadHistory`."""


def check_arguments(_: object, server_args: Any) -> None:
    """Say at the start that the policy is on; called when SGLang has read its arguments.

    Raises `IntegrationError` without --enable-eplb: SGLang would make no plans.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    if not resolving_view(server_args).enable_eplb:
        raise IntegrationError("equipoise: eplb_policy needs --enable-eplb")
    # As SGLang does for its own EPLB: its logging is not configured yet, and would drop less.
    LOG.warning("equipoise: eplb_policy switched on")


def plan_from_installed(
    settings: EplbPolicySettings,
    stock: Callable[..., Any],
    manager: Any,
    logical_count: torch.Tensor,
    *,
    broadcast_over_world: bool,
) -> Any:
    """Plan in place of `EPLBManager._compute_expert_location_metadata`.

    Args:
        settings: of `eplb_policy`.
        stock: SGLang's own method.
        manager: the `EPLBManager`.
        logical_count: (steps, layers, experts), tokens of each expert, summed over ranks.
        broadcast_over_world: whether the group of ranks has just grown.

    Returns:
        The `ExpertLocationMetadata` to be installed. With elastic expert parallelism it is SGLang's
        own, whose algorithm knows which ranks are there.
    """
    from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager
    from sglang.srt.eplb.expert_location import (
        ExpertLocationMetadata,
        get_global_expert_location_metadata,
    )

    setattr(manager, CHANGED_LAYERS, None)
    history = _load_history(manager)
    installed = get_global_expert_location_metadata()
    elastic = broadcast_over_world or ElasticEPStateManager.instance() is not None
    if elastic:
        LOG.warning("equipoise eplb_policy: ranks may come and go; SGLang plans this rebalance")
    if elastic or installed is None:
        history.clear()
        return stock(manager, logical_count, broadcast_over_world=broadcast_over_world)
    old_map = installed.physical_to_logical_map_cpu
    shape = ExpertShape(
        installed.num_layers,
        installed.num_logical_experts,
        installed.num_physical_experts,
        installed.ep_size,
    )
    steps = logical_count if logical_count.dim() == 3 else logical_count[None]
    # Summed on the device: the recorder has a thousand steps, and a plan looks at their halves.
    halves = [half.sum(dim=0, dtype=torch.int64) for half in steps.tensor_split(2) if len(half)]
    old = valid_placement(integer_ids(old_map, "physical_to_logical_map"), shape)
    counts = integer_counts(torch.stack(halves))
    plan = plan_placement(counts, shape, old, settings, history.predictive(counts))
    history.add(counts)
    _log_plan(plan, shape)
    differs = np.ones(shape.layers, bool) if old is None else (plan.placement != old).any(axis=1)
    setattr(manager, CHANGED_LAYERS, frozenset(np.flatnonzero(differs).tolist()))
    device = installed.physical_to_logical_map.device
    # Not by SGLang's own function for that, which reads each slot of a device's tensor by itself.
    logical_to_slots = logical_maps(plan.placement, shape.experts).logical_to_physical
    return ExpertLocationMetadata._init_raw(
        ep_size=shape.ranks,
        physical_to_logical_map=torch.from_numpy(plan.placement).to(device),
        logical_to_all_physical_map=torch.from_numpy(logical_to_slots).to(device),
    )


def only_changed_layers(stock: Callable[..., list[list[int]]], manager: Any) -> list[list[int]]:
    """Leave layers out of `EPLBManager._compute_update_layer_ids_chunks` that do not change."""
    changed = getattr(manager, CHANGED_LAYERS, None)
    chunks = stock(manager)
    if changed is None:
        return chunks
    kept = [[layer for layer in chunk if layer in changed] for chunk in chunks]
    return [chunk for chunk in kept if chunk]


def _load_history(manager: Any) -> LoadHistory:
    """Return the manager's history; made at its first rebalance."""
    if not hasattr(manager, LOAD_HISTORY):
        setattr(manager, LOAD_HISTORY, LoadHistory())
    history: LoadHistory = getattr(manager, LOAD_HISTORY)
    return history


def _log_plan(plan: PolicyPlan, shape: ExpertShape) -> None:
    before = "none" if plan.balancedness_before is None else f"{plan.balancedness_before:.4f}"
    LOG.info(
        "equipoise eplb_policy: %d of %d layers change, %d of %d slots move, "
        "balancedness %s -> %.4f predicted",
        plan.changed_layers,
        shape.layers,
        plan.moved_slots,
        shape.layers * shape.slots,
        before,
        plan.balancedness_after,
    )
