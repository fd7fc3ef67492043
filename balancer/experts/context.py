"""The arguments of one rank's balancer: its device, its peers, and how weights move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from equipoise.balancer.experts.agreement.key_collector import StoredKey
from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.runtime.events import NO_EVENTS, EventSink
from equipoise.balancer.experts.runtime.workers import WorkerFactory
from equipoise.balancer.experts.transfer.host_writes import HostWeights
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.capabilities import Capabilities
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.slots import SlotStore


@dataclass(frozen=True)
class StagedFromPeers:
    """Weights are transferred from peers during the forward pass and committed between two steps.

    Attributes:
        host_weights: weights in host memory, to reload experts whose last replica was on a lost
            rank; None if there are none.
    """

    host_weights: HostWeights | None = None


@dataclass(frozen=True)
class InPlaceFromHost:
    """Weights come from host memory, and layers are rewritten in place, a few per step.

    Attributes:
        host_weights: the weights and their writer.
        capabilities: capabilities of the accelerator's backend, which are checked.
        entries_per_step: by layer, how often every step enters it; 1 by default.
    """

    host_weights: HostWeights
    capabilities: Capabilities
    entries_per_step: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class NoRebalancing:
    """Weights and shares stay as they are; load is summed all the same."""


UpdatePathConfig = StagedFromPeers | InPlaceFromHost | NoRebalancing
STAGED_FROM_PEERS = StagedFromPeers()
NO_REBALANCING = NoRebalancing()


@dataclass(frozen=True)
class BalancerContext:
    """The arguments of a rank's balancer, independent of the layout.

    Attributes:
        accelerator: this rank's device.
        fabric: this rank's connection to the other ranks.
        store: this rank's slots.
        config: intervals, bounds and share mode.
        path: how weights get into slots.
        new_worker: makes the workers that overlap with the forward pass.
        members: the ranks among which experts are distributed.
        first_step: the step of the first boundary.
        events: the event sink; it returns at once and never raises.
        uncollected: keys of the previous group, which no rank needs any more.
        loads_watched: whether any rank has an event sink. Then all ranks sum every sub-window,
            since a sum is collective.
    """

    accelerator: Accelerator
    fabric: Fabric
    store: SlotStore
    config: BalancerConfig
    path: UpdatePathConfig
    new_worker: WorkerFactory
    members: EPGroup
    first_step: int = 0
    events: EventSink = NO_EVENTS
    uncollected: tuple[StoredKey, ...] = ()
    loads_watched: bool = False

    @property
    def node(self) -> int:
        """The number of this rank's node, of those that the configuration counts."""
        return self.members.rank_in_group // self._ranks_per_node

    @property
    def ranks_of_node(self) -> tuple[int, ...]:
        """The ranks of this rank's node, numbered as in the run."""
        first = self.node * self._ranks_per_node
        return self.members.ranks[first : first + self._ranks_per_node]

    @property
    def _ranks_per_node(self) -> int:
        return len(self.members.ranks) // self.config.nodes

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """Opens a communicator among the members, or some of them; collective among these."""
        name = f"{self.members.scoped_name(self.config.name)}.{purpose}"
        return self.fabric.open(name, self.members.ranks if ranks is None else ranks)
