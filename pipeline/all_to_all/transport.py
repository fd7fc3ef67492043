"""How packed messages get from rank to rank: among all of a group, or among those that are active.

Which of the two is settled when the exchange is made: nobody asks in a step.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Protocol

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator, Exchange, PeerBuffer
from equipoise.hal.errors import ExchangeError
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work


class AllToAllTransport(Protocol):
    """Carries one message a pair and direction."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def active(self) -> tuple[bool, ...]:
        """By rank of the group, whether it takes part."""
        ...

    def all_to_all(self, into: Tensor, source: Tensor, stream: Stream) -> Work:
        """Send row r of `source`, uint8 [ranks, n], to rank r; fill `into` likewise.

        Comes after what was launched on `stream`. The rows of inactive ranks are neither read nor
        written.
        """
        ...


class AllRanksTransport:
    """Every rank of the communicator: one even all-to-all.

    Args:
        communicator: used for nothing else.
        accelerator: of the streams that messages are packed on.
        deadline: seconds that the host waits for a stream, where the communicator is not ordered
            by streams (clause X6).
    """

    def __init__(
        self, communicator: Communicator, accelerator: Accelerator, deadline: float
    ) -> None:
        self._communicator = communicator
        self._ordered = _order(communicator, accelerator, deadline)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._communicator.rank

    @property
    def active(self) -> tuple[bool, ...]:
        """All of them."""
        return (True,) * self._communicator.size

    def all_to_all(self, into: Tensor, source: Tensor, stream: Stream) -> Work:
        """One collective."""
        self._ordered.wait_packed(stream)
        with stream.current():
            return self._communicator.all_to_all(into, source)


class ActiveRanksTransport:
    """Some ranks of the communicator: one round of blobs, to and from these only (clause X1).

    A collective would wait for ranks that do not come. To make it is collective among the active
    ranks, whose links it builds; the others have opened the communicator, and no more.

    Args:
        communicator: used for nothing else.
        accelerator: of the streams that messages are packed on.
        deadline: as `AllRanksTransport`.
        active: ranks of the communicator, this one among them; the same on all of them.

    Raises:
        ExchangeError: a rank that is not of the group, or this one is not active.
    """

    def __init__(
        self,
        communicator: Communicator,
        accelerator: Accelerator,
        deadline: float,
        active: Sequence[int],
    ) -> None:
        if not {communicator.rank} <= set(active) <= set(range(communicator.size)):
            raise ExchangeError(
                f"active ranks: expected rank {communicator.rank} and others of "
                f"{communicator.size}, got {tuple(active)}"
            )
        self._communicator = communicator
        self._ordered = _order(communicator, accelerator, deadline)
        self._peers = sorted(set(active) - {communicator.rank})
        # In one order on all of them, now: links that are built in a step block it (clause X2).
        communicator.warm(list(combinations(sorted(active), 2)))

    @property
    def rank(self) -> int:
        """This rank."""
        return self._communicator.rank

    @property
    def active(self) -> tuple[bool, ...]:
        """Those that were named."""
        present = {self.rank, *self._peers}
        return tuple(rank in present for rank in range(self._communicator.size))

    def all_to_all(self, into: Tensor, source: Tensor, stream: Stream) -> Work:
        """One round; a rank's own rows are copied on `stream`."""
        mine = self.rank
        stream.launch(lambda: into[mine].copy_(source[mine]))
        self._ordered.wait_packed(stream)
        sends = tuple(PeerBuffer(peer, source[peer]) for peer in self._peers)
        receives = tuple(PeerBuffer(peer, into[peer]) for peer in self._peers)
        with stream.current():
            return self._communicator.exchange(Exchange(sends, receives))


class _StreamOrder:
    """Operations come after the current stream by themselves."""

    def wait_packed(self, stream: Stream) -> None:
        """Nothing to do."""


class _HostOrder:
    """The host waits for the stream: no count is read, but it cannot run ahead."""

    def __init__(self, accelerator: Accelerator, deadline: float) -> None:
        self._event = accelerator.event()
        self._deadline = deadline

    def wait_packed(self, stream: Stream) -> None:
        """Return when everything launched on `stream` has run."""
        stream.record(self._event)
        self._event.synchronize(self._deadline)


def _order(
    communicator: Communicator, accelerator: Accelerator, deadline: float
) -> _StreamOrder | _HostOrder:
    if communicator.capabilities.stream_ordered:
        return _StreamOrder()
    return _HostOrder(accelerator, deadline)


def active_mask(wire: AllToAllTransport, device: torch.device) -> Tensor:
    """bool [ranks + 1]: who takes part; the last stands for the rank of padding."""
    return torch.tensor([*wire.active, False]).to(device)
