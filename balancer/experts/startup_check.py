"""Checks the arguments of a start on this rank, and lists what all ranks must have in common."""

from dataclasses import fields

from equipoise.balancer.experts.agreement.same_on_all_ranks import Values
from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.context import StagedFromPeers, UpdatePathConfig
from equipoise.balancer.experts.placement import ExpertShape, Layout, check_placement
from equipoise.balancer.experts.planning.topology import topology
from equipoise.hal.errors import EngineError, PlacementError
from equipoise.hal.slots import SlotStore

PER_RANK_FIELDS = ("log_balancedness", "log_balancedness_interval")
"""Fields of a configuration that may differ between ranks: who writes log lines."""


def check_start(
    store: SlotStore,
    shape: ExpertShape,
    layout: Layout,
    config: BalancerConfig,
    path: UpdatePathConfig,
    ranks: int,
) -> None:
    """Checks that a balancer with these arguments can work on `ranks` ranks.

    Raises:
        PlacementError: the layout is not of the shape, the shape not of these ranks, or there
            are too few slots, ranks or nodes to survive what the planner is to survive.
        EngineError: the store has other slots, or no staging where weights come from peers; or
            ranks of several nodes route the same rows, with shares of a node.
    """
    if shape.ranks != ranks:
        raise PlacementError(f"the shape is of {shape.ranks} ranks, the group of {ranks}")
    check_placement(layout.placement, shape)
    topology(shape, config.nodes, config.planner.survive, None)
    slots, required_slots = len(store.layout.slots), shape.layers * shape.slots_per_rank
    if slots != required_slots:
        raise EngineError(
            f"the store has {slots} slots; {shape.layers} layers of "
            f"{shape.slots_per_rank} slots a rank take {required_slots}"
        )
    sharing, per_node = config.ranks_sharing_rows, ranks // config.nodes
    if config.shares is ShareMode.NODE and per_node % sharing:
        raise EngineError(
            f"shares {config.shares} level the rows of {per_node} ranks together, but {sharing} "
            "ranks route the same rows"
        )
    if isinstance(path, StagedFromPeers) and not store.layout.staging:
        raise EngineError("the staged path needs a store with staging")


def start_values(
    store: SlotStore,
    shape: ExpertShape,
    layout: Layout,
    config: BalancerConfig,
    path: UpdatePathConfig,
) -> Values:
    """Returns the values of a start that have to be the same on all ranks."""
    return {
        "shape": str(shape),
        "layout": layout.digest,
        **config_values(config),
        "path": type(path).__name__,
        "staging": str(store.layout.staging),
    }


def config_values(config: BalancerConfig) -> Values:
    """Returns the fields of a configuration that have to be the same on all ranks."""
    names = [field.name for field in fields(config) if field.name not in PER_RANK_FIELDS]
    return {f"config.{name}": repr(getattr(config, name)) for name in names}
