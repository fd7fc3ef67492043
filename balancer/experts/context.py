"""What one rank's balancer is put together from: its device, its peers, and how weights move."""

from collections.abc import Mapping
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
    """Weights come from peers, beside the forward, and are committed between two steps.

    Attributes:
        spare: where else weights are to be had when ranks are lost that held the last copies;
            None where they are nowhere else.
    """

    spare: HostWeights | None = None


@dataclass(frozen=True)
class InPlaceFromHost:
    """Weights come from the host's memory, and layers are rewritten in place, a few a step.

    Attributes:
        supply: the weights, and who writes them.
        capabilities: of the accelerator's backend, which has to have what this takes.
        entries: by layer, how often every step enters it; once where nothing is said.
    """

    supply: HostWeights
    capabilities: Capabilities
    entries: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class NoRebalancing:
    """Weights stay where they are, and shares too; loads are summed all the same."""


UpdatePathConfig = StagedFromPeers | InPlaceFromHost | NoRebalancing
STAGED_FROM_PEERS = StagedFromPeers()
NO_REBALANCING = NoRebalancing()


@dataclass(frozen=True)
class BalancerContext:
    """What a rank balances with, whatever is installed.

    Attributes:
        accelerator: this rank's device.
        fabric: this rank's connection to the others.
        store: this rank's slots.
        config: cadence, bounds and share mode.
        path: how weights come into slots.
        new_worker: makes who works beside the forward.
        members: the ranks among which experts are spread.
        first_step: the step of the first boundary.
        events: told what happens; returns at once and never raises.
        uncollected: what a group before this one has asked, and nobody needs any more.
        loads_watched: whether any rank has an event sink: then all ranks sum every sub-window,
            since a sum takes all of them.
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

    def open(self, what: str) -> Communicator:
        """A communicator among the members; collective."""
        name = f"{self.members.scoped_name(self.config.name)}.{what}"
        return self.fabric.open(name, self.members.ranks)
