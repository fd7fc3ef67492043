"""Mutants of family *faults*: what breaks only after another fault."""

from typing import TYPE_CHECKING

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import network_with
from torch import Tensor

from equipoise.backends.virtual.control_plane import VirtualControlPlane
from equipoise.backends.virtual.network import Network
from equipoise.backends.virtual.operation import VirtualOperation
from equipoise.hal.conformance.properties.faults import FAULTS
from equipoise.hal.errors import CommunicatorFailed, RankLost

if TYPE_CHECKING:
    from equipoise.backends.virtual.world import VirtualWorld


class DeathIsNotHeard(Network):
    """Waits for a dead peer for ever: no deadline and no failure ends the operation."""

    def ready(self) -> bool:
        return False

    def due(self) -> list[VirtualOperation]:
        return [op for op in super().due() if self.dead.isdisjoint(op.peers)]


class DeathEndsWell(Network):
    """Ends what has lost its peer as if it were complete."""

    def step(self) -> None:
        operation = self._first_orphan()
        if operation is not None:
            operation.outbox.withdraw(operation)
            operation.finish()


class ErrorNamesNoOperation(Network):
    """Says that a peer is lost, but not to whom."""

    def step(self) -> None:
        operation = self._first_orphan()
        if operation is not None:
            text = f"{operation.communicator.purpose!r} lost its peer"
            self.cut(operation, CommunicatorFailed, text)


class DeathFailsEverything(Network):
    """Fails every communicator of whoever has lost a peer on one of them."""

    def step(self) -> None:
        operation = self._first_orphan()
        super().step()
        if operation is not None:
            for other in self.world.fabric(operation.communicator.member)._open:
                other.fail(CommunicatorFailed, "a peer is lost", other.rebuilds)


class DeathKeepsBuffers(Network):
    """Never gives back the tensors of what has lost its peer."""

    def __init__(self, world: "VirtualWorld") -> None:
        super().__init__(world)
        self._operation_tensors: list[Tensor] = []

    def step(self) -> None:
        operation = self._first_orphan()
        if operation is not None:
            self._operation_tensors += operation.tensors
        super().step()


class LateRankIsAccused(Network):
    """Takes whoever has not come by the deadline for silent, though it beats."""

    def expire(self) -> bool:
        for operation in self.due():
            self.world.silent |= operation.peers
        return super().expire()


class WrongRankIsAccused(VirtualControlPlane):
    """Names the rank after the one that is lost."""

    def _evidence(self) -> RankLost | None:
        loss = super()._evidence()
        if loss is None:
            return None
        return RankLost((loss.rank + 1) % self.size, loss.reason, loss.operation)


class LossNamesNoOperation(VirtualControlPlane):
    """Names the lost rank, but not the operation."""

    def _evidence(self) -> RankLost | None:
        loss = super()._evidence()
        return None if loss is None else RankLost(loss.rank, loss.reason, "something")


MUTANTS = (
    Mutant(
        name="the-death-of-a-peer-is-not-heard",
        clause="C8",
        broken="An operation whose peer is dead waits for ever.",
        property=FAULTS.name,
        subject=network_with(network=DeathIsNotHeard),
    ),
    Mutant(
        name="an-operation-ends-well-without-a-dead-peer",
        clause="E1",
        broken="An operation whose peer is dead ends without an error.",
        property=FAULTS.name,
        subject=network_with(network=DeathEndsWell),
    ),
    Mutant(
        name="the-error-after-a-death-names-no-operation",
        clause="E1",
        broken="An error says that a peer is lost, but not which operation failed.",
        property=FAULTS.name,
        subject=network_with(network=ErrorNamesNoOperation),
    ),
    Mutant(
        name="a-death-fails-every-communicator",
        clause="X3",
        broken="A rank that loses a peer on one communicator can use none of them any more.",
        property=FAULTS.name,
        subject=network_with(network=DeathFailsEverything),
    ),
    Mutant(
        name="buffers-stay-after-a-death",
        clause="R1",
        broken="What an operation held when its peer died is never given back.",
        property=FAULTS.name,
        subject=network_with(network=DeathKeepsBuffers),
    ),
    Mutant(
        name="a-rank-that-is-late-is-accused",
        clause="C5",
        broken="A rank that beats, but did not come to an operation, is said to be lost.",
        property=FAULTS.name,
        subject=network_with(network=LateRankIsAccused),
    ),
    Mutant(
        name="the-wrong-rank-is-accused",
        clause="C5",
        broken="The control plane names another rank than the one that is gone.",
        property=FAULTS.name,
        subject=network_with(control=WrongRankIsAccused),
        # Ranks are lost there, too.
        also=("ballots-outlive-the-rank-that-cast-them",),
    ),
    Mutant(
        name="a-loss-is-told-without-the-operation",
        clause="C5",
        broken="The control plane names the lost rank, but not what was being done.",
        property=FAULTS.name,
        subject=network_with(control=LossNamesNoOperation),
        # Ranks are lost there, too.
        also=("ballots-outlive-the-rank-that-cast-them",),
    ),
)
