"""SGLang's balancer of experts: DeepSeek's plan, and the dispatch `static`, `dynamic` and `lp`.

Sources: SGLang 0.5.23, `sglang/srt/eplb/`: `eplb_algorithms/deepseek.py` (plan),
`expert_location.py` (the maps of a rank), `expert_location_dispatch.py` (dispatch),
`lplb_solver.py` (shares of `lp`), `eplb_manager.py` (cadence); `sglang/srt/arg_groups/fields/
exec_.py` and `parallel_hook.py` (defaults). What is exact and what is not: docs/design/replay.md.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Load,
    LogicalMaps,
    Placement,
    logical_maps,
)
from equipoise.balancer.experts.planning.planner import plan
from equipoise.hal.errors import PlacementError
from equipoise.report.replay.engine_model import (
    Cadence,
    EngineModel,
    Ids,
    Parts,
    SplitKind,
    WindowLoad,
)
from equipoise.report.replay.engines.greedy_packing import pack_in_order
from equipoise.report.replay.engines.torch_sort import argsort_descending

VERSION = "0.5.23"
STATIC_SEED = 42
"""Of the generator that `static` divides ranks with."""
RANDOM_VALUES = 65536
"""`dynamic` draws a whole number below it, modulo the number of replicas."""
DEEPSEEK_GROUPS = 8
"""Expert groups of DeepSeek-V3 and R1, the models for which SGLang plans by groups."""
KEPT_LOCATIONS = 4
"""Placements whose maps are kept: a replay asks for those of one or two, again and again."""

Slots = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ExpertLocation:
    """What ranks know of one placement.

    Attributes:
        maps: slots of each expert, in SGLang's order, which is not always ascending.
        nearest: (ranks, layers, experts), the slot that a rank prefers: its own, or its node's
            where the node has some of the replicas and not all; -1 if it prefers none.
        narrowed: (ranks, layers, experts), the only slot that a rank's map names; -1 if it names
            all replicas.
    """

    maps: LogicalMaps
    nearest: Slots
    narrowed: Slots

    @cached_property
    def static_slots(self) -> Slots:
        """(ranks, layers, experts): the slot that `static` has each rank use.

        Ranks that prefer no replica are divided among all of them, equally and by a seeded shuffle.
        Every rank draws for all ranks, expert by expert, and uses its own part; a rank whose map
        is narrowed has nothing to draw for such an expert, so that it reads on in its stream.
        """
        slots = self.nearest.copy()
        unsettled = self.nearest < 0
        # Ranks with equal maps draw the same, so one of them draws for all.
        maps, first, group = np.unique(
            self.narrowed.reshape(len(slots), -1), axis=0, return_index=True, return_inverse=True
        )
        for number in range(len(maps)):
            members = group.reshape(-1) == number
            drawn = unsettled.any(axis=0) & (self.narrowed[first[number]] < 0)
            random = Random(STATIC_SEED)
            for layer, expert in zip(*np.nonzero(drawn), strict=True):
                count = self.maps.replica_count[layer, expert]
                replicas = self.maps.logical_to_physical[layer, expert, :count].tolist()
                asking = np.flatnonzero(unsettled[:, layer, expert])
                choices = np.array(_divide(replicas, len(asking), random))
                own = members[asking]
                slots[asking[own], layer, expert] = choices[own]
        return slots


def _divide(replicas: list[int], ranks: int, random: Random) -> list[int]:
    """Returns the replica of each rank: all equally often, what is left over by lot, shuffled."""
    times, rest = divmod(ranks, len(replicas))
    choices = replicas * times + random.sample(replicas, rest)
    random.shuffle(choices)
    return choices


class ExpertLocations:
    """The maps of the placements that were planned or asked for last.

    How an expert's replicas are ordered, and whether a rank's map is narrowed, depends on where a
    placement comes from. One that the planner made keeps the order in which the plan made replicas
    (`ExpertLocationMetadata.init_by_eplb`). Any other is taken for one that the server was started
    with, trivial or by the `physical_to_logical_map` of `--init-expert-location`: replicas are in
    order of their slots, and a rank with a replica of its own, or whose node has a part of them,
    knows only that one (`init_by_mapping`). A mixture of two plans, layer by layer, is also taken
    for such a one: SGLang makes it only with `--eplb-rebalance-layers-per-chunk`.

    Args:
        nodes: that the ranks are divided among.
    """

    def __init__(self, nodes: int = 1) -> None:
        self.nodes = nodes
        self._kept: deque[tuple[Placement, ExpertLocation]] = deque(maxlen=KEPT_LOCATIONS)

    def add_planned(self, placement: Placement, maps: LogicalMaps, shape: ExpertShape) -> None:
        """Keeps the order of the replicas of a plan."""
        nearest = nearest_slots(maps, shape, self.nodes)
        single = np.where(maps.replica_count == 1, nearest, -1)
        self._kept.appendleft((placement.copy(), ExpertLocation(maps, nearest, single)))

    def of(self, placement: Placement, shape: ExpertShape) -> ExpertLocation:
        """Returns what ranks know of `placement`."""
        for kept, location in self._kept:
            # Compared by value: whoever replays may change a placement layer by layer.
            if len(location.nearest) == shape.ranks and np.array_equal(kept, placement):
                return location
        maps = logical_maps(placement, shape.experts)
        nearest = nearest_slots(maps, shape, self.nodes)
        location = ExpertLocation(maps, nearest, nearest)
        self._kept.appendleft((placement.copy(), location))
        return location


def nearest_slots(maps: LogicalMaps, shape: ExpertShape, nodes: int) -> Slots:
    """Returns the slot that each rank prefers, (ranks, layers, experts), -1 for none.

    It is an expert's only slot, else the first on the rank, else the first on its node if the node
    has some of the replicas and not all. Raises `PlacementError` if ranks do not divide among
    nodes.
    """
    _check_divides("nodes", nodes, "ranks", shape.ranks)
    by_node, node_replicas = _first_slots(maps, shape, nodes)
    partly = (node_replicas > 0) & (node_replicas < maps.replica_count)
    nearest = np.repeat(np.where(partly, by_node, -1), shape.ranks // nodes, axis=0)
    by_rank, _ = _first_slots(maps, shape, shape.ranks)
    nearest = np.where(by_rank >= 0, by_rank, nearest)
    return np.where(maps.replica_count == 1, maps.logical_to_physical[:, :, 0], nearest)


def _check_divides(divisors: str, divisor: int, name: str, number: int) -> None:
    if number % divisor:
        raise PlacementError(f"{number} {name} do not divide among {divisor} {divisors}")


def _first_slots(maps: LogicalMaps, shape: ExpertShape, parts: int) -> tuple[Slots, Slots]:
    """Returns the first replica and their number within each of equal parts of the slots.

    Both are (parts, layers, experts); -1 where a part has none.
    """
    layer, expert, place = np.nonzero(maps.logical_to_physical >= 0)
    slot = maps.logical_to_physical[layer, expert, place]
    part = slot // (shape.slots // parts)
    cells = parts, shape.layers, shape.experts
    cell, first, count = np.unique(
        np.ravel_multi_index((part, layer, expert), cells), return_index=True, return_counts=True
    )
    slots, counts = np.full(cells, -1, dtype=np.int64), np.zeros(cells, dtype=np.int64)
    slots.flat[cell] = slot[first]
    counts.flat[cell] = count
    return slots, counts


@dataclass(frozen=True)
class DeepseekPlanner:
    """DeepSeek's plan, slot for slot that of SGLang's `rebalance_experts`.

    With one group and one node it is `deepseek`, which SGLang takes for models without expert
    groups; `deepseek_hierarchical` packs groups to nodes first, and replicates within nodes.
    Loads are float32: whole numbers are exact up to 2**24, and above are rounded as SGLang's are.
    Source: `eplb_algorithms/deepseek.py`, which is DeepSeek's EPLB.

    Args:
        locations: keeps the order of each expert's replicas, for dispatch.
        groups: expert groups of the model.
        nodes: divides groups and ranks.
    """

    locations: ExpertLocations = field(default_factory=ExpertLocations)
    groups: int = 1
    nodes: int = 1

    def __call__(self, load: WindowLoad, installed: Placement, shape: ExpertShape) -> Placement:
        """Returns the next placement; `installed` does not matter to it."""
        placement, maps = self.plan(load.experts, shape)
        self.locations.add_planned(placement, maps, shape)
        return placement

    def plan(self, load: Load, shape: ExpertShape) -> tuple[Placement, LogicalMaps]:
        """Plans for rows (layers, experts).

        Returns:
            int32 (layers, slots), and the maps with replicas in the order of SGLang's
            `logical_to_physical_map`.

        Raises:
            PlacementError: experts do not divide among groups, or groups or ranks among nodes.
        """
        _check_divides("groups", self.groups, "experts", shape.experts)
        _check_divides("nodes", self.nodes, "groups", self.groups)
        _check_divides("nodes", self.nodes, "ranks", shape.ranks)
        weight = load.astype(np.float32)
        expert_of = self._experts_by_node(weight)
        rows = np.take_along_axis(weight, expert_of, axis=1).reshape(
            shape.layers * self.nodes, shape.experts // self.nodes
        )
        local, number, size = _replicate(rows, shape.slots // self.nodes)
        slot = _pack(size, shape.ranks // self.nodes)
        by_slot = np.empty((2, *slot.shape), dtype=np.int64)
        np.put_along_axis(by_slot, slot[None], np.stack([local, number]), axis=2)
        node_of_row = (np.arange(len(rows)) % self.nodes)[:, None]
        position = by_slot[0] + node_of_row * rows.shape[1]
        placement = np.take_along_axis(expert_of, position.reshape(shape.layers, -1), axis=1)
        maps = _maps(placement, by_slot[1].reshape(placement.shape), shape)
        return placement.astype(np.int32), maps

    def _experts_by_node(self, weight: Weights) -> Slots:
        """Returns the experts in the order of their nodes, and there of their groups."""
        layers, experts = weight.shape
        size = experts // self.groups
        # A sum of less than 2**24 rows is exact in any order; above, torch's may differ in the last
        # bit, which matters to groups of almost the same load.
        pack, place = _balanced_packs(weight.reshape(layers, -1, size).sum(axis=2), self.nodes)
        start = (pack * (self.groups // self.nodes) + place) * size
        position = (start[:, :, None] + np.arange(size)).reshape(layers, experts)
        return np.argsort(position, axis=1)


def _replicate(rows: Weights, slots: int) -> tuple[Slots, Slots, Weights]:
    """Gives each further slot to the largest load per replica, ties to the lower expert.

    Returns:
        Expert of each replica, its number among that expert's, and its load, (rows, slots).
    """
    count, experts = rows.shape
    replicas, row = np.ones_like(rows), np.arange(count)
    expert = np.tile(np.arange(slots), (count, 1))
    number = np.zeros_like(expert)
    for slot in range(experts, slots):
        largest = (rows / replicas).argmax(axis=1)
        expert[:, slot] = largest
        number[:, slot] = replicas[row, largest]
        replicas[row, largest] += 1
    return expert, number, np.take_along_axis(rows / replicas, expert, axis=1)


def _balanced_packs(weight: Weights, packs: int) -> tuple[Slots, Slots]:
    """Packs by descending weight; where a pack holds one item, items stay in order."""
    items = weight.shape[1]
    if items == packs:
        pack = np.broadcast_to(np.arange(items), weight.shape)
        return pack, np.zeros_like(pack)
    order = argsort_descending(weight)
    packed = pack_in_order(np.take_along_axis(weight, order, axis=1).astype(np.float64), packs)
    found = np.empty((2, *weight.shape), dtype=np.int64)
    np.put_along_axis(found, order[None], np.stack(packed), axis=2)
    return found[0], found[1]


def _pack(size: Weights, ranks: int) -> Slots:
    pack, place = _balanced_packs(size, ranks)
    slots: Slots = pack * (size.shape[1] // ranks) + place
    return slots


def _maps(placement: Slots, number: Slots, shape: ExpertShape) -> LogicalMaps:
    """Returns the maps of replicas that are numbered, both (layers, slots)."""
    table = np.full((shape.layers, shape.experts, int(number.max()) + 1), -1, dtype=np.int64)
    table[np.arange(shape.layers)[:, None], placement, number] = np.arange(shape.slots)
    return LogicalMaps(table, (table >= 0).sum(axis=2))


@dataclass(frozen=True)
class StaticDispatch:
    """`static`: each rank sends all rows of an expert to one replica. Exact, shuffle included.

    The default with an all-to-all backend.
    """

    locations: ExpertLocations
    name: str = "static"
    split: SplitKind = SplitKind.BY_SOURCE

    def parts(self, placement: Placement, shape: ExpertShape) -> Parts:
        """Returns the part of the ranks that use each slot."""
        slots = self.locations.of(placement, shape).static_slots
        parts: Parts = _count_slots(slots, shape) / np.float32(shape.ranks)
        return parts

    def route(
        self,
        ids: Ids,
        sources: Ids,
        placement: Placement,
        shape: ExpertShape,
        layer: int,
        step: int,
    ) -> Ids:
        """Returns the slot of each id, as SGLang's table of the rank has it."""
        table = self.locations.of(placement, shape).static_slots[:, layer]
        return _where_valid(ids, table[sources[:, None], ids])


@dataclass(frozen=True)
class DynamicDispatch:
    """`dynamic` with an all-to-all backend: each row draws one of the replicas.

    SGLang draws on the device, whose numbers are not repeated here; the odds are its own, of a
    whole number below 65,536 modulo the number of replicas.
    """

    locations: ExpertLocations
    name: str = "dynamic"
    split: SplitKind = SplitKind.DRAWN

    def parts(self, placement: Placement, shape: ExpertShape) -> Parts:
        """Returns the odds of each slot, mean over ranks."""

        def odds(count: Slots, place: Slots) -> npt.NDArray[np.float64]:
            least, more = np.divmod(RANDOM_VALUES, count)
            return (least + (place < more)) / RANDOM_VALUES

        location = self.locations.of(placement, shape)
        drawn = _parts_by_place(location.maps, shape, odds)
        free = (location.narrowed < 0).mean(axis=0)
        own = _count_slots(location.narrowed, shape) / shape.ranks
        by_expert = np.take_along_axis(free, placement.astype(np.int64), axis=1)
        parts: Parts = (drawn * by_expert + own).astype(np.float32)
        return parts

    def route(
        self,
        ids: Ids,
        sources: Ids,
        placement: Placement,
        shape: ExpertShape,
        layer: int,
        step: int,
    ) -> Ids:
        """Draws a slot for each id; the same step and layer draw the same."""
        location = self.locations.of(placement, shape)
        numbers = np.random.default_rng((step, layer)).integers(RANDOM_VALUES, size=ids.shape)
        slots = _slots_at(location.maps, ids, layer, numbers)
        own = location.narrowed[sources[:, None], layer, ids]
        return _where_valid(ids, np.where(own >= 0, own, slots))


@dataclass(frozen=True)
class RankInvariantDispatch:
    """`dynamic` with `--moe-a2a-backend none`: row number modulo the number of replicas. Exact.

    All ranks then run the same rows, and have to agree. It is the default there, and `static` and
    `lp` are refused. A row's number is its place in the batch of all ranks; rows that only pad the
    batch have numbers too.
    """

    locations: ExpertLocations
    name: str = "dynamic_rank_invariant"
    split: SplitKind = SplitKind.DRAWN

    def parts(self, placement: Placement, shape: ExpertShape) -> Parts:
        """Returns equal parts: over many rows, numbers fall on all replicas alike."""
        maps = self.locations.of(placement, shape).maps
        return _parts_by_place(maps, shape, lambda count, _: 1 / count).astype(np.float32)

    def route(
        self,
        ids: Ids,
        sources: Ids,
        placement: Placement,
        shape: ExpertShape,
        layer: int,
        step: int,
    ) -> Ids:
        """Returns the slot of each id; `sources` and `step` do not matter."""
        maps = self.locations.of(placement, shape).maps
        rows = np.arange(len(ids))[:, None]
        return _where_valid(ids, _slots_at(maps, ids, layer, rows))


@dataclass(frozen=True)
class LpDispatch:
    """`lp`: a linear programme divides each batch so that the largest rank has the least rows.

    SGLang solves it on the device, by five steps of an interior point method in float32, from the
    counts of all ranks; each row then draws a replica with those odds. Here it is solved to its
    optimum by the planner's flow, in parts of 1 / 65536. Where several solutions are optimal,
    theirs may be another; where their solver does not converge, they divide evenly.
    """

    locations: ExpertLocations
    name: str = "lp"
    split: SplitKind = SplitKind.BY_BATCH

    def parts(self, placement: Placement, shape: ExpertShape) -> Parts:
        """Raises `NotImplementedError`: parts are solved for a batch, see `batch_parts`."""
        raise NotImplementedError("lp divides each batch by its own counts")

    def batch_parts(self, load: Load, placement: Placement, shape: ExpertShape) -> Parts:
        """Returns the parts for the rows of one batch over all ranks, int64 (layers, experts)."""
        best = plan(
            load,
            slots=shape.slots,
            ranks=shape.ranks,
            installed=placement,
            max_copies=0,
            target=0.0,
        )
        parts: Parts = best.shares.astype(np.float32) / np.float32(SHARE_ONE)
        return parts

    def route(
        self,
        ids: Ids,
        sources: Ids,
        placement: Placement,
        shape: ExpertShape,
        layer: int,
        step: int,
    ) -> Ids:
        """Draws a slot for each id by the parts of this batch; a step and layer draw the same."""
        location = self.locations.of(placement, shape)
        counts = np.bincount(ids[ids >= 0], minlength=shape.experts)
        one = ExpertShape(1, shape.experts, shape.slots, shape.ranks)
        parts = self.batch_parts(counts[None], placement[layer : layer + 1], one)[0]
        table = location.maps.logical_to_physical[layer]
        cumulative = np.where(table >= 0, parts[table], np.float32(0)).cumsum(axis=1)
        drawn = np.random.default_rng((step, layer)).random(ids.shape, dtype=np.float32)
        # Parts are whole 1 / 65536, so that an expert's last sum is 1, which no draw reaches.
        place = (cumulative[ids] <= drawn[..., None]).sum(axis=-1)
        own = location.narrowed[sources[:, None], layer, ids]
        return _where_valid(ids, np.where(own >= 0, own, table[ids, place]))


def _slots_at(maps: LogicalMaps, ids: Ids, layer: int, numbers: Slots) -> Slots:
    """Returns the replica of each id that a number points at, modulo how many there are."""
    place = numbers % maps.replica_count[layer][ids]
    slots: Slots = maps.logical_to_physical[layer, ids, place]
    return slots


def _where_valid(ids: Ids, slots: Slots) -> Ids:
    return np.where(ids >= 0, slots, -1).astype(np.int32)


def _count_slots(slots: Slots, shape: ExpertShape) -> npt.NDArray[np.float32]:
    """Counts how often each slot of a layer is named in (ranks, layers, experts); -1 is none."""
    flat = (np.arange(shape.layers)[:, None] * shape.slots + slots)[slots >= 0]
    counts = np.bincount(flat, minlength=shape.layers * shape.slots)
    return counts.reshape(shape.layers, shape.slots).astype(np.float32)


def _parts_by_place(
    maps: LogicalMaps,
    shape: ExpertShape,
    part: Callable[[Slots, Slots], npt.NDArray[np.float64]],
) -> npt.NDArray[np.float64]:
    """Returns (layers, slots): parts by how many replicas the expert has, and by place."""
    layer, expert, place = np.nonzero(maps.logical_to_physical >= 0)
    parts = np.zeros((shape.layers, shape.slots))
    slot = maps.logical_to_physical[layer, expert, place]
    parts[layer, slot] = part(maps.replica_count[layer, expert], place)
    return parts


CADENCE = Cadence(
    window=1000,
    interval=1000,
    first=1001,
    layers_per_step=None,
    blocking=True,
    source="SGLang 0.5.23: eplb_rebalance_num_iterations 1000, also the recorder's buffer; "
    "eplb_rebalance_layers_per_chunk None, all layers between two forward passes; "
    "eplb_min_rebalancing_utilization_threshold 1.0, which leaves out no rebalance",
)


def experts_in_turn(shape: ExpertShape) -> Placement:
    """The placement that SGLang starts with: slot i has expert i mod experts."""
    row = np.arange(shape.slots, dtype=np.int32) % shape.experts
    return np.tile(row, (shape.layers, 1))


def sglang_model(nodes: int = 1) -> EngineModel:
    """Returns the model for ranks on so many nodes; planner and rules share what ranks know.

    SGLang's `auto` plans by groups where the model has groups that divide among nodes: policy
    `deepseek_hierarchical`, with the eight groups of DeepSeek-V3; otherwise all ranks together.
    """
    locations = ExpertLocations(nodes)
    by_groups = DeepseekPlanner(locations, DEEPSEEK_GROUPS, nodes)
    return EngineModel(
        name="sglang",
        version=VERSION,
        cadence=CADENCE,
        planner=DeepseekPlanner(locations),
        rules=(
            StaticDispatch(locations),
            DynamicDispatch(locations),
            RankInvariantDispatch(locations),
            LpDispatch(locations),
        ),
        policies={} if nodes == 1 else {"deepseek_hierarchical": by_groups},
        initial=experts_in_turn,
    )


SGLANG = sglang_model()
"""SGLang on one node."""
