"""A network that lets one communicator of a rank move at a time, and how to live with it."""

from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.network import Network
from equipoise.backends.virtual.operation import Operation
from equipoise.backends.virtual.outbox import Item


class SerialNetwork(Network):
    """An operation starts when all that its rank issued earlier elsewhere has ended.

    Its deadline counts from when nobody in its group is held up so: what is stuck on one
    communicator does not fail another's operations (clauses P3, X3). Where all groups hold each
    other up, all are struck.
    """

    def behind(self, item: Item) -> bool:
        """Whether another communicator of the same rank comes first."""
        if not isinstance(item, Operation):
            return False
        for operation in self.pending:
            if operation is item:
                return False
            same = operation.communicator.member == item.communicator.member
            if same and operation.communicator is not item.communicator and not operation.ended:
                return True
        return False

    def due(self) -> list[Operation]:
        """What is pending in groups of which no rank is held up."""
        pending = super().due()
        held_up = {op.outbox.group for op in pending if self.behind(op)}
        return [op for op in pending if op.outbox.group not in held_up] or pending


class SerialCommunicator(VirtualCommunicator):
    """Asks such a network when to start."""

    def may_start(self, item: Item) -> bool:
        """Whether no other communicator of this rank comes first."""
        network = self.world.network
        free = not (isinstance(network, SerialNetwork) and network.behind(item))
        return free and super().may_start(item)
