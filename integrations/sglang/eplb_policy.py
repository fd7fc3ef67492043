"""`eplb_policy` of SGLang: its rebalances start from the installed placement.

SGLang plans each rebalance from scratch, so that nearly every slot gets another expert. These hooks
around its `EPLBManager` plan from the placement that is installed, leave out layers that do not
change, and fill the tables of its dispatch by the load; its recorder, its condition for a rebalance
and its transfer of weights stay.

All ranks plan for themselves, from counts that SGLang has summed over ranks and with integers, so
all get the same. An exception is raised: a rank that fell back alone would serve another placement.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from equipoise.balancer.compat.input_arrays import Counts, integer_counts, integer_ids
from equipoise.balancer.experts.placement import (
    ABSENT,
    ExpertShape,
    Ids,
    Placement,
    Shares,
    even_shares,
    solve_shares,
)
from equipoise.hal.errors import IntegrationError
from equipoise.integrations.sglang import local_dispatch
from equipoise.integrations.sglang.dispatch_tables import (
    DispatchTable,
    even_candidates,
    rank_dispatch,
    weighted_candidates,
)
from equipoise.integrations.sglang.load_history import LoadHistory
from equipoise.integrations.sglang.metrics import metrics
from equipoise.integrations.sglang.settings import Dispatch, SglangPolicySettings
from equipoise.integrations.vllm.eplb.policy_plan import PolicyPlan, plan_placement, valid_placement

LOG = logging.getLogger("sglang.srt.equipoise")
"""A child of SGLang's logger, whose format and level it inherits."""
STATE = "equipoise_eplb_policy"
"""Attribute of a manager, a `PolicyState`."""
LEVELLED = "static", "dynamic"
"""Words of `--ep-dispatch-algorithm` whose tables are filled by the load."""


@dataclass
class PolicyState:
    """What a manager keeps from one rebalance to the next.

    Attributes:
        history: loads of earlier windows.
        shares: int32 (layers, slots) of the installed dispatch table, None if SGLang made it.
        moved_layers: layers whose weights move in the rebalance that was planned last; None if
            SGLang planned it.
        levelled: whether the layers that do not move get another dispatch table then.
    """

    history: LoadHistory = field(default_factory=LoadHistory)
    shares: Shares | None = None
    moved_layers: frozenset[int] | None = None
    levelled: bool = False


def resolve_arguments(
    settings: SglangPolicySettings, stock: Callable[[Any], None], server_args: Any
) -> None:
    """Around `handle_eplb_and_dispatch`: check the arguments, and say that the policy is on.

    Raises `IntegrationError` without --enable-eplb, as SGLang would make no plans, and where the
    arguments do not go with the dispatch.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    is_local = settings.dispatch is Dispatch.LOCAL
    if is_local:
        local_dispatch.choose_algorithm(server_args)
    stock(server_args)
    arguments = resolving_view(server_args)
    if not arguments.enable_eplb:
        raise IntegrationError("equipoise cannot be switched on: eplb_policy needs --enable-eplb")
    if is_local:
        local_dispatch.check_arguments(arguments)
    # As SGLang does for its own EPLB: its logging is not configured yet, and would drop less.
    with_dispatch = ", with dispatch local" if is_local else ""
    LOG.warning("equipoise: eplb_policy switched on%s", with_dispatch)


def plan_from_installed(
    settings: SglangPolicySettings,
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
    from sglang.srt.eplb import expert_location

    state = _state(manager)
    state.moved_layers = None
    installed = expert_location.get_global_expert_location_metadata()
    elastic = broadcast_over_world or ElasticEPStateManager.instance() is not None
    if elastic:
        LOG.warning("equipoise eplb_policy: ranks may come and go; SGLang plans this rebalance")
    if elastic or installed is None:
        setattr(manager, STATE, PolicyState())
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
    earlier = state.history.predictive(counts)
    plan = plan_placement(counts, shape, old, settings, earlier)
    state.history.add(counts)
    algorithm = expert_location.get_exec().moe.ep_dispatch_algorithm
    nodes = expert_location.get_parallel().nnodes
    load = counts.sum(axis=0) + earlier
    table = dispatch_table(algorithm, load, plan.placement, shape, nodes)
    is_local = settings.dispatch is Dispatch.LOCAL

    def predict(placement: Placement, shares: Shares | None) -> float:
        # What the batches of a window add up to, where each is levelled by itself.
        levelled = solve_shares(load, placement, shape) if is_local else shares
        return _balancedness(load, placement, levelled, shape)

    before = None if old is None else predict(old, state.shares)
    after = predict(plan.placement.astype(np.int32), table.shares)
    _report(plan, shape, before, after)
    differs = np.ones(shape.layers, bool) if old is None else (plan.placement != old).any(axis=1)
    state.shares = table.shares
    state.moved_layers = frozenset(np.flatnonzero(differs).tolist())
    state.levelled = algorithm in LEVELLED and not is_local
    return _metadata(installed, plan.placement, table, shape)


def only_changed_layers(stock: Callable[..., list[list[int]]], manager: Any) -> list[list[int]]:
    """Leave layers out of `EPLBManager._compute_update_layer_ids_chunks` that do not change.

    Layers that only get another dispatch table take no weights and hardly any time: where layers
    are updated in chunks, they are the first one, all together.
    """
    state = _state(manager)
    chunks = stock(manager)
    moved = state.moved_layers
    if moved is None or (state.levelled and len(chunks) == 1):
        return chunks
    changed = [[layer for layer in chunk if layer in moved] for chunk in chunks]
    if state.levelled:
        changed.insert(0, [layer for chunk in chunks for layer in chunk if layer not in moved])
    return [chunk for chunk in changed if chunk]


def dispatch_table(
    algorithm: str | None, load: Counts, placement: Ids, shape: ExpertShape, nodes: int
) -> DispatchTable:
    """Return the table that SGLang's `--ep-dispatch-algorithm` looks up.

    Args:
        algorithm: SGLang's word; all but `static` and `dynamic` get SGLang's own table.
        load: int64 (layers, experts), tokens.
        placement: int64 (layers, slots), the expert in each slot.
        shape: numbers of layers, experts, slots and ranks.
        nodes: number of nodes.
    """
    match algorithm:
        case "static":
            return rank_dispatch(load, placement, shape, nodes)
        case "dynamic":
            return weighted_candidates(load, placement, shape)
    return even_candidates(placement, shape)


def _metadata(installed: Any, placement: Ids, table: DispatchTable, shape: ExpertShape) -> Any:
    """Return SGLang's `ExpertLocationMetadata`.

    Not by its own functions: they read each slot of a device's tensor by itself, and make a table
    of dispatch that divides evenly. Where weights are loaded, SGLang goes by the map on the host,
    in which a slot stands once.
    """
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata

    if installed.logical_to_all_physical_map.device.type == "cpu":
        # There SGLang's map on the host is the same tensor as that of the dispatch.
        installed.logical_to_all_physical_map_cpu = (
            installed.logical_to_all_physical_map_cpu.clone()
        )
    candidates = even_candidates(placement, shape).slots
    static = installed.logical_to_rank_dispatch_physical_map
    device = installed.physical_to_logical_map.device
    rank = torch.distributed.get_rank() % shape.ranks
    dispatched = candidates if static is not None else table.slots
    on_host = torch.from_numpy(placement)
    return ExpertLocationMetadata(
        physical_to_logical_map=on_host.to(device),
        physical_to_logical_map_cpu=on_host,
        logical_to_all_physical_map=_padded(dispatched, shape).to(device),
        logical_to_all_physical_map_cpu=_padded(candidates, shape),
        logical_to_all_physical_map_num_valid=torch.from_numpy(
            (dispatched != ABSENT).sum(axis=2)
        ).to(device),
        ep_size=shape.ranks,
        logical_to_rank_dispatch_physical_map=(
            None if static is None else torch.from_numpy(table.slots[rank]).to(device)
        ),
    )


def _padded(candidates: Ids, shape: ExpertShape) -> torch.Tensor:
    """Return (layers, experts, slots), SGLang's width."""
    width = shape.slots - candidates.shape[2]
    return torch.nn.functional.pad(torch.from_numpy(candidates), (0, width), value=ABSENT)


def _state(manager: Any) -> PolicyState:
    """Return the manager's state; made at its first rebalance."""
    if not hasattr(manager, STATE):
        setattr(manager, STATE, PolicyState())
    state: PolicyState = getattr(manager, STATE)
    return state


def _report(plan: PolicyPlan, shape: ExpertShape, before: float | None, after: float) -> None:
    """Log a plan; on the first rank, count it."""
    LOG.info(
        "equipoise eplb_policy: %d of %d layers change, %d of %d slots move, "
        "balancedness %s -> %.4f predicted",
        plan.changed_layers,
        shape.layers,
        plan.moved_slots,
        shape.layers * shape.slots,
        "none" if before is None else f"{before:.4f}",
        after,
    )
    counted = metrics() if torch.distributed.get_rank() == 0 else None
    if counted is not None:
        try:
            counted.report(plan.moved_slots, before, after)
        except OSError as error:
            # The other ranks go on, and would wait for this one.
            LOG.warning("equipoise eplb_policy: metrics could not be written: %s", error)


def _balancedness(
    load: Counts, placement: Placement, shares: Shares | None, shape: ExpertShape
) -> float:
    """Return mean / max of the ranks' tokens, both summed over layers; 1.0 without load.

    `shares` None: SGLang's table, which divides evenly.
    """
    if shares is None:
        shares = even_shares(placement, shape.experts)
    rows = np.take_along_axis(load, placement.astype(np.int64), axis=1) * shares
    ranks = rows.reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    fullest = sum(ranks.max(axis=1).tolist())
    return sum(ranks.sum(axis=1).tolist()) / shape.ranks / fullest if fullest else 1.0
