"""Plans: which expert sits in which slot, and how its load is divided among its copies.

    equipoise.plan(load, slots=288, ranks=32, installed=running.placement)

Every layer is planned by itself. The algorithms are in csrc/planning/ (`connected`, `incremental`,
`max_flow_levelling`), and on the page docs/design/planning.md; integers throughout, so that every
machine gets the same plan.
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
from equipoise.hal.errors import PlacementError

REPLICA_SWAP_RATIO = 1.6
"""A copy changes hands when the one expert's load per copy is so much above the other's."""
UNBOUNDED = 2**31 - 1
MAX_THREADS = 1024
"""That the native core takes; there is one a layer at most."""


@dataclass(frozen=True)
class Plan:
    """A placement with shares, and what it promises for the load that it was planned for.

    Attributes:
        placement: int32 (layers, slots), the expert in each slot.
        shares: int32 (layers, slots), the part of its expert that a slot takes, in 1 / 65536.
        moves: copies that their rank did not hold; all of them where nothing was installed.
        predicted_imbalance: max/mean - 1 of the ranks under the load planned on, mean over layers;
            with `active_experts`, of the experts that run on a rank, the largest in each batch.
        layer_moves: int64 (layers,), the same by layer.
        layer_imbalance: float64 (layers,), the same by layer.
    """

    placement: Placement
    shares: Shares
    moves: int
    predicted_imbalance: float
    layer_moves: npt.NDArray[np.int64]
    layer_imbalance: npt.NDArray[np.float64]

    @cached_property
    def digest(self) -> str:
        """Of placement and shares; equal on two machines exactly when the plans are."""
        return placement_digest(self.placement, self.shares)


@dataclass(frozen=True)
class _PlanCall:
    """What the native core is told, but for the number of copies."""

    inputs: PlannerInput
    topology: RankTopology
    installed: Placement | None
    policy: PlanningPolicy
    native_options: npt.NDArray[np.int32]
    max_copies_per_rank: int
    threads: int

    def run(self, policy: PlanningPolicy, allowance: npt.NDArray[np.int64]) -> Plan:
        """One call; `allowance` (layers,) is how many copies a layer may move."""
        placement, shares, moves, uneven = self._call_native(policy, allowance)
        self.topology.check_survival(placement)
        return Plan(
            placement=placement,
            shares=shares,
            moves=int(moves.sum()),
            predicted_imbalance=float(uneven.sum()) / SHARE_ONE / self.topology.shape.layers,
            layer_moves=moves,
            layer_imbalance=uneven / SHARE_ONE,
        )

    def _call_native(
        self, policy: PlanningPolicy, allowance: npt.NDArray[np.int64]
    ) -> tuple[Any, ...]:
        """Raises `PlacementError` where `installed` has no slot for an expert."""
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
            # The native core checks what is installed, faster; what is wrong is said in our words.
            if self.installed is not None:
                check_placement(self.installed, self.topology.shape)
            raise PlacementError(str(error)) from error

    def within_budget(self, budget: int | None) -> Plan:
        """The plan that moves at most so many copies."""
        most = np.full(self.topology.shape.layers, UNBOUNDED, dtype=np.int64)
        if self.installed is None:
            return self.run(self.policy, most)
        none = np.zeros_like(most)
        if budget == 0:
            return self.run(PlanningPolicy.INCREMENTAL, none)
        wanted = self.run(self.policy, most)
        if budget is None or wanted.moves <= budget:
            return wanted
        kept = self.run(PlanningPolicy.INCREMENTAL, none)
        uneven = kept.layer_imbalance
        if self.policy is PlanningPolicy.INCREMENTAL:
            allowance = allocate_budget(wanted.layer_moves, uneven, budget)
            return self.run(self.policy, allowance)
        return self._mix_layers(kept, wanted, select_layers(wanted.layer_moves, uneven, budget))

    def with_single_replicas(self, found: Plan) -> Plan:
        """The same with whole shares, and what they promise, where active experts are planned."""
        if self.inputs.active is None:
            return found
        whole = assign_single_replica(self.inputs.active, found.placement, self.topology.capacity)
        return replace(
            found,
            shares=whole.shares,
            predicted_imbalance=float(whole.imbalance.mean()),
            layer_imbalance=whole.imbalance,
        )

    def _mix_layers(self, kept: Plan, wanted: Plan, taken: npt.NDArray[np.bool_]) -> Plan:
        rows = taken[:, None]
        placement = np.where(rows, wanted.placement, kept.placement)
        shares = np.where(rows, wanted.shares, kept.shares)
        moves = np.where(taken, wanted.layer_moves, kept.layer_moves)
        uneven = np.where(taken, wanted.layer_imbalance, kept.layer_imbalance)
        return Plan(
            placement=placement,
            shares=shares,
            moves=int(moves.sum()),
            predicted_imbalance=float(uneven.mean()),
            layer_moves=moves,
            layer_imbalance=uneven,
        )


def plan(  # noqa: PLR0913 - what an operator can ask for, by name
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
) -> Plan:
    """Where to put the experts of each layer, for a load, and what part each copy takes.

    Every layer is planned by itself, in integers: every machine gets the same plan.

    Args:
        load: rows by expert, integers, none negative: (layers, experts), or (windows, layers,
            experts), which are summed. With objective `active_experts` the rows of each batch of
            recorded routing: (batches, layers, experts).
        slots: of a layer, over all ranks; a multiple of `ranks`. Ranks can be connected from
            `ranks` - 1 slots more than experts on.
        ranks: that the slots of a layer are divided among, neighbours together.
        nodes: of as many ranks each: rank r is on node r // (ranks // nodes).
        installed: integers (layers, slots), the expert in each slot now. Without it `incremental`
            plans as `connected` does.
        policy: `greedy` (DeepSeek's and TensorRT-LLM's rule), `connected` (anew, so that shares can
            level any batch) or `incremental` (from what is installed, with few moves).
        target: imbalance, max / mean - 1 of the ranks, that `incremental` is content with.
        slack: how far below the mean, as a part of it, `incremental` keeps the experts of a rank
            that have one copy, where it has to move anything: so that shares have room for what
            batches bring.
        max_copies: that may move, over all layers.
        max_copies_per_rank: slots of a layer that a rank may fill anew, for example because it has
            so many staging buffers. `incremental` with `installed` alone: what it plans is a step
            of the way.
        byte_budget: bytes that may move, over all layers; goes with `expert_bytes`.
        expert_bytes: of one expert of one layer.
        node_cost: what `incremental` takes a copy from another node to cost, in copies within one.
        survive: 0 nothing; 1 the loss of a rank: every expert on two ranks; 2 of a node: on two
            nodes. `greedy` does not see to it, nor does `incremental` where what is installed is
            not so: refused.
        sigma: a rank counts with its load and so many standard deviations of it over the windows,
            so that experts which are busy together do not share a rank. 0, and one window, for the
            load alone; so does `greedy`. By default 1 where there are 8 windows or more and the
            objective is tokens, else 0.
        capacities: of the ranks, in any unit; None for equal ones. `greedy` packs as if they were
            equal.
        objective: `tokens` or `active_experts`. With the latter all rows of an expert go to one of
            its copies, because every copy that gets a row costs its weights; shares are 0 or 65536.
        threads: over layers; they change nothing but the time.
        split: `shares`, or `even` for engines that know no shares.

    Raises:
        PlacementError: the numbers cannot fit together; says which and why.
    """
    chosen = parse_choice(PlanningPolicy, "policy", policy)
    demand = planner_input(load, sigma, chosen, parse_choice(Objective, "objective", objective))
    if demand.active is not None and parse_choice(Split, "split", split) is Split.EVEN:
        raise PlacementError("active_experts runs an expert on one rank: split must be shares")
    layers, experts = demand.load.shape
    shape = ExpertShape(layers, experts, slots, ranks)
    group = topology(shape, nodes, survive, capacities)
    if demand.load.sum(axis=1).max() > (most := max_layer_rows(group.capacity)):
        raise PlacementError(f"a layer has more than {most} rows, the most with these capacities")
    task = _PlanCall(
        demand,
        group,
        _installed(installed, shape),
        chosen,
        _native_options(
            target, slack, node_cost, demand.sigma, parse_choice(Split, "split", split)
        ),
        _per_rank(max_copies_per_rank, policy, installed),
        min(_positive("threads", threads), MAX_THREADS),
    )
    return task.with_single_replicas(
        task.within_budget(_budget(max_copies, byte_budget, expert_bytes))
    )


def allocate_budget(
    wanted: npt.NDArray[np.int64], imbalance: npt.NDArray[np.float64], budget: int
) -> npt.NDArray[np.int64]:
    """How many of the copies that it wants each layer gets: the most uneven layers first."""
    granted = np.zeros_like(wanted)
    for layer in np.argsort(-imbalance, kind="stable"):
        granted[layer] = min(int(wanted[layer]), budget)
        budget -= int(granted[layer])
    return granted


def select_layers(
    wanted: npt.NDArray[np.int64], imbalance: npt.NDArray[np.float64], budget: int
) -> npt.NDArray[np.bool_]:
    """Which layers get all the copies that they want: the most uneven first, of those that fit.

    A layer that is planned anew is changed as a whole or not at all, so a part of what it wants
    would be lost to it and to the others.
    """
    taken = np.zeros(wanted.shape, dtype=np.bool_)
    for layer in np.argsort(-imbalance, kind="stable"):
        taken[layer] = wanted[layer] <= budget
        budget -= int(wanted[layer]) if taken[layer] else 0
    return taken


def _budget(copies: int | None, size: int | None, expert: int | None) -> int | None:
    if (size is None) != (expert is None):
        raise PlacementError("byte_budget and expert_bytes go together")
    for name, value in (("max_copies", copies), ("byte_budget", size)):
        if value is not None and value < 0:
            raise PlacementError(f"{name} must not be negative, got {value}")
    affordable = (
        [] if size is None or expert is None else [size // _positive("expert_bytes", expert)]
    )
    return min([*affordable, *([] if copies is None else [copies])], default=None)


def _per_rank(most: int | None, policy: str, installed: npt.ArrayLike | None) -> int:
    if most is None:
        return UNBOUNDED
    if most < 0:
        raise PlacementError(f"max_copies_per_rank must not be negative, got {most}")
    if policy != PlanningPolicy.INCREMENTAL or installed is None:
        raise PlacementError("max_copies_per_rank takes policy incremental, and what is installed")
    return min(most, UNBOUNDED)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise PlacementError(f"{name} must be positive, got {value}")
    return value


def _installed(installed: npt.ArrayLike | None, shape: ExpertShape) -> Placement | None:
    if installed is None:
        return None
    given = array_of("installed", installed)
    if given.dtype.kind not in "iu":
        raise PlacementError(f"installed must be integers, got {given.dtype}")
    if given.shape != (shape.layers, shape.slots):
        wanted = shape.layers, shape.slots
        raise PlacementError(f"a placement is int32 {wanted}, got {given.dtype} {given.shape}")
    if given.dtype != np.int32 and (given.min() < 0 or given.max() >= shape.experts):
        # Before numbers are cut to 32 bits, and may look right.
        raise PlacementError(f"installed names an expert outside [0, {shape.experts})")
    return np.ascontiguousarray(given, dtype=np.int32)


def _native_options(
    target: float, slack: float, node_cost: float, sigma: float, split: Split
) -> npt.NDArray[np.int32]:
    for name, value, least, most in (
        ("target", target, 0.0, 1000.0),
        ("slack", slack, 0.0, 1.0),
        ("node_cost", node_cost, 1.0, 1000.0),
    ):
        if not least <= value <= most:
            raise PlacementError(f"{name} must be {least:g} to {most:g}, got {value:g}")
    parts = [round(value * SHARE_ONE) for value in (target, slack, REPLICA_SWAP_RATIO)]
    rest = [round(value * SHARE_ONE) for value in (node_cost, sigma)]
    return np.array([*parts, *rest, tuple(Split).index(split)], dtype=np.int32)
