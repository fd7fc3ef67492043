"""All-to-all of packed messages, among all ranks of a group or only the active ones.

The choice is made when the exchange is created, so a step does not check it.
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
    """Sends one message from each rank to each other."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def active(self) -> tuple[bool, ...]:
        """For each rank of the group, whether it takes part."""
        ...

    def all_to_all(self, into: Tensor, source: Tensor, stream: Stream) -> Work:
        """Send row r of `source`, uint8 [ranks, n], to rank r; receive row r of `into` from rank r.

        Runs after what was launched on `stream`. Rows of inactive ranks are neither read nor
        written.
        """
        ...


class AllRanksTransport:
    """All ranks of the communicator take part: one even all-to-all.

    Args:
        communicator: used by this transport only.
        accelerator: of the streams that messages are packed on.
        deadline: seconds that the host waits for a stream, if the communicator does not follow
            streams (clause X6).
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
        """True for all ranks."""
        return (True,) * self._communicator.size

    def all_to_all(self, into: Tensor, source: Tensor, stream: Stream) -> Work:
        """Issue one collective."""
        self._ordered.wait_packed(stream)
        with stream.current():
            return self._communicator.all_to_all(into, source)


class ActiveRanksTransport:
    """Some ranks of the communicator take part: one round of point-to-point messages (clause X1).

    A collective would wait for the inactive ranks. Creating the transport is collective among the
    active ranks, since it builds their links; inactive ranks only have opened the communicator.

    Args:
        communicator: used by this transport only.
        accelerator: of the streams that messages are packed on.
        deadline: as for `AllRanksTransport`.
        active: the active ranks of the communicator, this one included; equal on all of them.

    Raises:
        ExchangeError: a rank is not in the group, or this rank is not active.
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
        # All ranks build links in one order, and now: building one in a step would block it (X2).
        communicator.warm(list(combinations(sorted(active), 2)))

    @property
    def rank(self) -> int:
        """This rank."""
        return self._communicator.rank

    @property
    def active(self) -> tuple[bool, ...]:
        """True for the active ranks."""
        present = {self.rank, *self._peers}
        return tuple(rank in present for rank in range(self._communicator.size))

    def all_to_all(self, into: Tensor, source: Tensor, stream: Stream) -> Work:
        """Issue one round; this rank's own row is copied on `stream`."""
        own = self.rank
        stream.launch(lambda: into[own].copy_(source[own]))
        self._ordered.wait_packed(stream)
        sends = tuple(PeerBuffer(peer, source[peer]) for peer in self._peers)
        receives = tuple(PeerBuffer(peer, into[peer]) for peer in self._peers)
        with stream.current():
            return self._communicator.exchange(Exchange(sends, receives))


class _StreamOrder:
    """For communicators that follow streams."""

    def wait_packed(self, stream: Stream) -> None:
        """Do nothing: the operation runs after the current stream."""


class _HostOrder:
    """For other communicators: the host waits for the stream, and so cannot run ahead of it."""

    def __init__(self, accelerator: Accelerator, deadline: float) -> None:
        self._event = accelerator.event()
        self._deadline = deadline

    def wait_packed(self, stream: Stream) -> None:
        """Block until everything launched on `stream` has run."""
        stream.record(self._event)
        self._event.synchronize(self._deadline)


def _order(
    communicator: Communicator, accelerator: Accelerator, deadline: float
) -> _StreamOrder | _HostOrder:
    if communicator.capabilities.stream_ordered:
        return _StreamOrder()
    return _HostOrder(accelerator, deadline)


def active_mask(transport: AllToAllTransport, device: torch.device) -> Tensor:
    """Return bool [ranks + 1], true for ranks that take part; the last one is the rank of
    padding."""
    return torch.tensor([*transport.active, False]).to(device)
