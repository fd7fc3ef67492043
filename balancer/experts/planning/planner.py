"""The planner: which expert is in which slot, and which share of its rows each slot takes.

    equipoise.plan(load, slots=288, ranks=32, installed=running.placement)

Every layer is planned by itself. The algorithms (`connected`, `incremental`, `max_flow_levelling`)
are in csrc/planning/ and on the page docs/design/planning.md; they use integers throughout, so that
every machine gets the same plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.balancer.experts.config import Objective, PlanningPolicy, Split, parse_choice
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Placement,
    Shares,
    check_placement,
    placement_digest,
)
from equipoise.balancer.experts.planning.inputs import (
    PlannerInput,
    array_of,
    assign_single_replica,
    planner_input,
)
from equipoise.balancer.experts.planning.topology import RankTopology, max_layer_rows, topology
from equipoise.hal.arguments import real_number
from equipoise.hal.errors import PlacementError

REPLICA_SWAP_RATIO = 1.6
"""The hysteresis: a slot goes to an expert whose load per replica is more than 1 + 1.6 times that
of the expert which gives it up."""
UNBOUNDED = 2**31 - 1
MAX_HEADROOM = 1000
HEADROOM = 6
"""Its position among the options of the native core."""
MAX_THREADS = 1024
"""Limit of the native core; more threads than layers are never started."""


@dataclass(frozen=True)
class Plan:
    """A placement with shares, and its imbalance for the load that it was planned for.

    Attributes:
        placement: int32 (layers, slots), the expert in each slot.
        shares: int32 (layers, slots), share of its expert's rows that a slot takes, in 1 / 65536.
        moves: slots whose expert the rank did not hold; all slots if nothing was installed.
        predicted_imbalance: max/mean - 1 over ranks for the load of the plan, mean over layers;
            with `active_experts`, of the experts that run on a rank, the largest in each batch.
        layer_moves: int64 (layers,), `moves` by layer.
        layer_imbalance: float64 (layers,), `predicted_imbalance` by layer.
    """

    placement: Placement
    shares: Shares
    moves: int
    predicted_imbalance: float
    layer_moves: npt.NDArray[np.int64]
    layer_imbalance: npt.NDArray[np.float64]

    @cached_property
    def digest(self) -> str:
        """Digest of placement and shares; equal on two machines exactly if the plans are."""
        return placement_digest(self.placement, self.shares)


@dataclass(frozen=True)
class _PlanCall:
    """The arguments of the native core except the number of copies."""

    inputs: PlannerInput
    topology: RankTopology
    installed: Placement | None
    policy: PlanningPolicy
    native_options: npt.NDArray[np.int32]
    max_copies_per_rank: int
    threads: int

    def run(self, policy: PlanningPolicy, allowance: npt.NDArray[np.int64]) -> Plan:
        """Calls the planner; `allowance` (layers,) limits the copies of each layer."""
        placement, shares, moves, imbalance_by_layer = self._call_native(policy, allowance)
        self.topology.check_survival(placement)
        return Plan(
            placement=placement,
            shares=shares,
            moves=int(moves.sum()),
            predicted_imbalance=float(imbalance_by_layer.sum())
            / SHARE_ONE
            / self.topology.shape.layers,
            layer_moves=moves,
            layer_imbalance=imbalance_by_layer / SHARE_ONE,
        )

    def _call_native(
        self, policy: PlanningPolicy, allowance: npt.NDArray[np.int64]
    ) -> tuple[Any, ...]:
        """Calls the native core. Raises `PlacementError`."""
        arguments = (
            self.inputs.load,
            self.inputs.windows,
            self.topology.shape.slots,
            self.topology.capacity,
            self.topology.nodes,
            self.topology.survive,
            self.installed,
            tuple(PlanningPolicy).index(policy),
            self.native_options,
            allowance,
            self.max_copies_per_rank,
            self.threads,
        )
        try:
            return _native.plan(*arguments)
        except ValueError as error:
            # The native core checks `installed` faster; this check has the clearer message.
            if self.installed is not None:
                check_placement(self.installed, self.topology.shape)
            raise PlacementError(str(error)) from error

    def within_budget(self, budget: int | None) -> Plan:
        """Returns the plan with at most `budget` copies."""
        most = np.full(self.topology.shape.layers, UNBOUNDED, dtype=np.int64)
        if self.installed is None:
            return self.run(self.policy, most)
        no_copies = np.zeros_like(most)
        if budget == 0:
            return self.run(PlanningPolicy.INCREMENTAL, no_copies)
        unlimited_plan = self.run(self.policy, most)
        if budget is None or unlimited_plan.moves <= budget:
            return unlimited_plan
        if self.native_options[HEADROOM]:
            # The target comes first: headroom only where there are copies enough for all of it.
            return replace(self, native_options=self._without_headroom()).within_budget(budget)
        without_copies = self.run(PlanningPolicy.INCREMENTAL, no_copies)
        imbalance_by_layer = without_copies.layer_imbalance
        if self.policy is PlanningPolicy.INCREMENTAL:
            allowance = allocate_budget(unlimited_plan.layer_moves, imbalance_by_layer, budget)
            return self.run(self.policy, allowance)
        return self._mix_layers(
            without_copies,
            unlimited_plan,
            select_layers(unlimited_plan.layer_moves, imbalance_by_layer, budget),
        )

    def with_single_replicas(self, plan: Plan) -> Plan:
        """Gives each expert a single replica if active experts are planned."""
        if self.inputs.active is None:
            return plan
        single = assign_single_replica(self.inputs.active, plan.placement, self.topology.capacity)
        return replace(
            plan,
            shares=single.shares,
            predicted_imbalance=float(single.imbalance.mean()),
            layer_imbalance=single.imbalance,
        )

    def _without_headroom(self) -> npt.NDArray[np.int32]:
        options = self.native_options.copy()
        options[HEADROOM] = 0
        return options

    def _mix_layers(
        self, without_copies: Plan, with_copies: Plan, selected: npt.NDArray[np.bool_]
    ) -> Plan:
        rows = selected[:, None]
        placement = np.where(rows, with_copies.placement, without_copies.placement)
        shares = np.where(rows, with_copies.shares, without_copies.shares)
        moves = np.where(selected, with_copies.layer_moves, without_copies.layer_moves)
        imbalance_by_layer = np.where(
            selected, with_copies.layer_imbalance, without_copies.layer_imbalance
        )
        return Plan(
            placement=placement,
            shares=shares,
            moves=int(moves.sum()),
            predicted_imbalance=float(imbalance_by_layer.mean()),
            layer_moves=moves,
            layer_imbalance=imbalance_by_layer,
        )


def plan(  # noqa: PLR0913 - one keyword per option
    load: npt.ArrayLike,
    *,
    slots: int,
    ranks: int,
    nodes: int = 1,
    installed: npt.ArrayLike | None = None,
    policy: str = "incremental",
    target: float = 0.02,
    slack: float = 0.1,
    max_copies: int | None = None,
    max_copies_per_rank: int | None = None,
    byte_budget: int | None = None,
    expert_bytes: int | None = None,
    node_cost: float = 1.0,
    survive: int = 0,
    sigma: float | None = None,
    capacities: Sequence[float] | None = None,
    objective: str = "tokens",
    threads: int = 1,
    split: str = "shares",
    headroom: int = 0,
) -> Plan:
    """Plans the placement of the experts of each layer for a load, with the share of each slot.

    Every layer is planned by itself, in integers: every machine gets the same plan.

    Args:
        load: rows by expert, integers, none negative: (layers, experts), or (windows, layers,
            experts), which are summed. With objective `active_experts`, recorded routing: the rows
            of each batch, (batches, layers, experts).
        slots: slots per layer over all ranks, a multiple of `ranks`. Ranks can be connected if
            there are at least `ranks` - 1 slots more than experts.
        ranks: number of ranks; neighbouring slots are on the same rank.
        nodes: number of nodes; rank r is on node r // (ranks // nodes).
        installed: integers (layers, slots), the expert in each slot now. Without it `incremental`
            plans as `connected`.
        policy: `greedy` (the rule of DeepSeek and TensorRT-LLM), `connected` (from scratch, so that
            shares can even out any batch) or `incremental` (from `installed`, with few copies).
        target: imbalance, max / mean - 1 over ranks, at which `incremental` stops.
        slack: fraction below the mean to which `incremental` limits the experts of a rank with one
            slot, if it changes the layer at all: room for shares to follow later batches.
        max_copies: maximum number of copies over all layers; needs `installed`.
        max_copies_per_rank: slots of a layer that a rank may fill, for example its staging buffers.
            Only for `incremental` with `installed`: the plan is then a step towards the best one.
        byte_budget: maximum number of bytes to copy over all layers; needs `expert_bytes` and
            `installed`.
        expert_bytes: bytes of one expert of one layer.
        node_cost: cost of a copy from another node for `incremental`, in copies within a node.
        survive: loss to survive: 0 none; 1 of a rank: every expert is on two ranks; 2 of a node: on
            two nodes. `greedy` does not ensure it, nor does `incremental` if the installed
            placement does not have it: that is refused.
        sigma: a rank counts with its load plus this many standard deviations over the windows, so
            that experts which are busy together do not share a rank. 0, a single window and
            `greedy` use the load alone. The default is 1 with 8 windows or more and the objective
            tokens, else 0.
        capacities: capacities of the ranks, in any unit; None if equal. `greedy` ignores them.
        objective: `tokens` or `active_experts`. With the latter all rows of an expert go to one
            replica, because every replica that gets a row has to read its weights; shares are 0 or
            65536.
        threads: threads over layers; the plan does not depend on it.
        split: `shares`, or `even` for engines without shares.
        headroom: maximum number of swaps of two experts in each layer that `incremental` changes
            with split `shares`, two copies each, which leave shares room to level single batches.

    Raises:
        PlacementError: the arguments do not fit together.
    """
    chosen = parse_choice(PlanningPolicy, "policy", policy)
    inputs = planner_input(load, sigma, chosen, parse_choice(Objective, "objective", objective))
    if inputs.active is not None and parse_choice(Split, "split", split) is Split.EVEN:
        raise PlacementError("active_experts runs an expert on one rank: split must be shares")
    layers, experts = inputs.load.shape
    numbers = {"slots": slots, "ranks": ranks, "nodes": nodes, "survive": survive}
    for name, value in {**numbers, "threads": threads}.items():
        _whole(name, value)
    shape = ExpertShape(layers, experts, slots, ranks)
    rank_topology = topology(shape, nodes, survive, capacities)
    if inputs.load.sum(axis=1).max() > (most := max_layer_rows(rank_topology.capacity)):
        raise PlacementError(f"a layer has more than {most} rows, the most with these capacities")
    plan_call = _PlanCall(
        inputs,
        rank_topology,
        _parse_installed(installed, shape),
        chosen,
        _native_options(
            target, slack, node_cost, inputs.sigma, parse_choice(Split, "split", split), headroom
        ),
        _per_rank(max_copies_per_rank, policy, installed),
        min(_positive("threads", threads), MAX_THREADS),
    )
    budget = _budget(max_copies, byte_budget, expert_bytes)
    if budget is not None and installed is None:
        name = "byte_budget" if max_copies is None else "max_copies"
        raise PlacementError(f"{name} needs installed: without it every copy is new")
    return plan_call.with_single_replicas(plan_call.within_budget(budget))


def allocate_budget(
    copies: npt.NDArray[np.int64], imbalance: npt.NDArray[np.float64], budget: int
) -> npt.NDArray[np.int64]:
    """Divides `budget` copies among layers, the most uneven layers first."""
    allowance = np.zeros_like(copies)
    for layer in np.argsort(-imbalance, kind="stable"):
        allowance[layer] = min(int(copies[layer]), budget)
        budget -= int(allowance[layer])
    return allowance


def select_layers(
    copies: npt.NDArray[np.int64], imbalance: npt.NDArray[np.float64], budget: int
) -> npt.NDArray[np.bool_]:
    """Selects the layers that get all their copies: the most uneven first, of those that fit.

    A layer that is planned from scratch is changed as a whole or not at all, so a part of its
    copies would be wasted.
    """
    selected = np.zeros(copies.shape, dtype=np.bool_)
    for layer in np.argsort(-imbalance, kind="stable"):
        selected[layer] = copies[layer] <= budget
        budget -= int(copies[layer]) if selected[layer] else 0
    return selected


def _budget(copies: int | None, size: int | None, expert: int | None) -> int | None:
    if (size is None) != (expert is None):
        raise PlacementError("byte_budget and expert_bytes go together")
    for name, value in (("max_copies", copies), ("byte_budget", size)):
        if value is not None and _whole(name, value) < 0:
            raise PlacementError(f"{name} must not be negative, got {value}")
    affordable = (
        [] if size is None or expert is None else [size // _positive("expert_bytes", expert)]
    )
    return min([*affordable, *([] if copies is None else [copies])], default=None)


def _per_rank(most: int | None, policy: str, installed: npt.ArrayLike | None) -> int:
    if most is None:
        return UNBOUNDED
    if _whole("max_copies_per_rank", most) < 0:
        raise PlacementError(f"max_copies_per_rank must not be negative, got {most}")
    if policy != PlanningPolicy.INCREMENTAL or installed is None:
        raise PlacementError("max_copies_per_rank takes policy incremental, and what is installed")
    return min(most, UNBOUNDED)


def _whole(name: str, value: int) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise PlacementError(f"{name} must be a whole number, got {value!r}")
    return value


def _positive(name: str, value: int) -> int:
    if _whole(name, value) < 1:
        raise PlacementError(f"{name} must be positive, got {value}")
    return value


def _parse_installed(installed: npt.ArrayLike | None, shape: ExpertShape) -> Placement | None:
    if installed is None:
        return None
    array = array_of("installed", installed)
    if array.dtype.kind not in "iu":
        raise PlacementError(f"installed must be integers, got {array.dtype}")
    if array.shape != (shape.layers, shape.slots):
        expected = shape.layers, shape.slots
        raise PlacementError(f"a placement is int32 {expected}, got {array.dtype} {array.shape}")
    if array.dtype != np.int32 and (array.min() < 0 or array.max() >= shape.experts):
        # Before the cast to 32 bits, after which a wrong number might be in range.
        raise PlacementError(f"installed names an expert outside [0, {shape.experts})")
    return np.ascontiguousarray(array, dtype=np.int32)


def _native_options(
    target: float, slack: float, node_cost: float, sigma: float, split: Split, headroom: int
) -> npt.NDArray[np.int32]:
    for name, value, least, most in (
        ("target", target, 0.0, 1000.0),
        ("slack", slack, 0.0, 1.0),
        ("node_cost", node_cost, 1.0, 1000.0),
    ):
        value = real_number(name, value, PlacementError)
        if not least <= value <= most:
            raise PlacementError(f"{name} must be {least:g} to {most:g}, got {value:g}")
    if not 0 <= _whole("headroom", headroom) <= MAX_HEADROOM:
        raise PlacementError(f"headroom must be 0 to {MAX_HEADROOM}, got {headroom}")
    values = target, slack, REPLICA_SWAP_RATIO, node_cost, sigma
    parts = [round(value * SHARE_ONE) for value in values]
    return np.array([*parts, tuple(Split).index(split), headroom], dtype=np.int32)
