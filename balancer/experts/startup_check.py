"""Whether a start can work on this rank, and what has to be the same on all of them."""

from dataclasses import dataclass, fields

from equipoise.balancer.experts.agreement.same_on_all_ranks import Values
from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.context import StagedFromPeers, UpdatePathConfig
from equipoise.balancer.experts.placement import ExpertShape, Layout, check_placement
from equipoise.balancer.experts.planning.topology import topology
from equipoise.hal.errors import EngineError, PlacementError
from equipoise.hal.slots import SlotStore

OWN = ("log_balancedness", "log_balancedness_interval")
"""Fields of a configuration that are each rank's own business: who writes lines to a log."""


@dataclass(frozen=True)
class StartupSpec:
    """What a balancer is to be opened with.

    Attributes:
        store: this rank's slots.
        shape: how many of everything.
        layout: what the slots hold.
        config: cadence, bounds and share mode.
        path: how weights come into slots.
    """

    store: SlotStore
    shape: ExpertShape
    layout: Layout
    config: BalancerConfig
    path: UpdatePathConfig

    def check(self, ranks: int) -> None:
        """See that it can work on so many ranks.

        Raises:
            PlacementError: the layout is not of the shape, the shape not of these ranks, or there
                are too few slots, ranks or nodes to survive what the aims say.
            EngineError: the store has other slots, or no staging where weights come from peers.
        """
        shape, slots, staging = self.shape, self.store.layout.slots, self.store.layout.staging
        if shape.ranks != ranks:
            raise PlacementError(f"the shape is of {shape.ranks} ranks, the group of {ranks}")
        check_placement(self.layout.placement, shape)
        topology(shape, self.config.nodes, self.config.planner.survive, None)
        wanted = shape.layers * shape.slots_per_rank
        if len(slots) != wanted:
            raise EngineError(
                f"the store has {len(slots)} slots; {shape.layers} layers of "
                f"{shape.slots_per_rank} slots a rank take {wanted}"
            )
        if isinstance(self.path, StagedFromPeers) and not staging:
            raise EngineError("weights that come by the boundary need a store with staging")

    def values(self) -> Values:
        """What has to be the same on all ranks."""
        return {
            "shape": str(self.shape),
            "layout": self.layout.digest,
            **config_values(self.config),
            "path": type(self.path).__name__,
            "staging": str(self.store.layout.staging),
        }


def config_values(config: BalancerConfig) -> Values:
    """What ranks have to configure alike, by field."""
    names = [field.name for field in fields(config) if field.name not in OWN]
    return {f"config.{name}": repr(getattr(config, name)) for name in names}
