"""Point-to-point messages for those who are compared: of torch.distributed, or of the HAL.

The same few verbs over both, so that whoever hands activations over does so on any link: straight
over torch.distributed where the link is real, and over a communicator of ours where the
communicator is what holds messages back.
"""

from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor, distributed

from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.work import Work


class Handle(Protocol):
    """A message in flight; its tensor is kept until it has ended."""

    def result(self) -> None:
        """Block until it ended; any number of times. Raises what the transport raises."""
        ...


class Wire(Protocol):
    """Messages between two ranks, first in, first out."""

    def isend(self, tensor: Tensor, rank: int) -> Handle:
        """Begin to send a contiguous tensor."""
        ...

    def irecv(self, tensor: Tensor, rank: int) -> Handle:
        """Begin to receive into a contiguous tensor."""
        ...


class Wires(Protocol):
    """Where wires come from."""

    def open(self, purpose: str) -> Wire:
        """The wire for a purpose, made when it is first asked for: by all ranks, in one order."""
        ...


class GlooHandle:
    """A work of torch.distributed; a second wait for a finished send would never end."""

    def __init__(self, work: Any, tensor: Tensor, deadline: timedelta) -> None:
        self._pending = [(work, tensor)]
        self._deadline = deadline

    def result(self) -> None:
        """See `Handle`."""
        while self._pending:
            work, _ = self._pending[0]
            work.wait(self._deadline)
            self._pending.pop()


class GlooWire:
    """A process group. See `Wire`."""

    def __init__(self, group: Any, deadline: float) -> None:
        self._group = group
        self._deadline = timedelta(seconds=deadline)

    def isend(self, tensor: Tensor, rank: int) -> GlooHandle:
        """See `Wire`."""
        work = distributed.isend(tensor, rank, group=self._group)
        return GlooHandle(work, tensor, self._deadline)

    def irecv(self, tensor: Tensor, rank: int) -> GlooHandle:
        """See `Wire`."""
        work = distributed.irecv(tensor, rank, group=self._group)
        return GlooHandle(work, tensor, self._deadline)


class GlooWires:
    """Process groups of torch.distributed, which is initialised. See `Wires`."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._made: dict[str, GlooWire] = {}

    def open(self, purpose: str) -> GlooWire:
        """See `Wires`."""
        if purpose not in self._made:
            timeout = timedelta(seconds=self._deadline)
            group = distributed.new_group(backend="gloo", timeout=timeout, group_desc=purpose)
            self._made[purpose] = GlooWire(group, self._deadline)
        return self._made[purpose]


class HalHandle:
    """A work of a communicator."""

    def __init__(self, work: Work, deadline: float) -> None:
        self._work = work
        self._deadline = deadline

    def result(self) -> None:
        """See `Handle`."""
        self._work.result(self._deadline)


class HalWire:
    """A communicator. See `Wire`."""

    def __init__(self, communicator: Communicator, deadline: float) -> None:
        self._communicator = communicator
        self._deadline = deadline

    def isend(self, tensor: Tensor, rank: int) -> HalHandle:
        """See `Wire`."""
        return HalHandle(self._communicator.isend(tensor, rank), self._deadline)

    def irecv(self, tensor: Tensor, rank: int) -> HalHandle:
        """See `Wire`."""
        return HalHandle(self._communicator.irecv(tensor, rank), self._deadline)


class HalWires:
    """Communicators of a fabric. See `Wires`."""

    def __init__(self, fabric: Fabric, deadline: float) -> None:
        self._fabric = fabric
        self._deadline = deadline
        self._made: dict[str, HalWire] = {}

    def open(self, purpose: str) -> HalWire:
        """See `Wires`."""
        if purpose not in self._made:
            self._made[purpose] = HalWire(self._fabric.open(purpose), self._deadline)
        return self._made[purpose]
