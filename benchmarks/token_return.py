"""Sampled tokens on their way from the last stage to the first: the same for all contestants.

Receives are posted when a micro-batch sets out, sends are waited for when their tensor is used
again. With blocking sends here the blocking hand-over could have one micro-batch in flight only:
the last stage would wait for a first one that waits for it.
"""

from typing import Protocol

import torch
from handover import Batch, Station
from stamps import stamp, wrong
from wire import Handle

TOKENS = 7
"""Which tensor of a step, for stamps."""


class TokenReturn(Protocol):
    """A stage's part in it: `take` and `expect` at the top of a step, `deliver` at its end."""

    def take(self) -> int:
        """Wait for what this step begins with; wrong words."""
        ...

    def expect(self, batch: Batch) -> None:
        """Get ready for what this step brings."""
        ...

    def deliver(self, batch: Batch) -> None:
        """Sample."""
        ...

    def drain(self) -> int:
        """Wait for all that is in flight; wrong words."""
        ...


class Between:
    """Stages that have to do with tokens neither way. See `TokenReturn`."""

    def take(self) -> int:
        """Nothing."""
        return 0

    def expect(self, batch: Batch) -> None:
        """Nothing."""

    def deliver(self, batch: Batch) -> None:
        """Nothing."""

    def drain(self) -> int:
        """Nothing."""
        return 0


class First(Between):
    """Begins a step with the tokens of the one so many before: the same micro-batch's."""

    def __init__(self, station: Station) -> None:
        self._wire = station.wires.open("tokens")
        self._last = station.ranks - 1
        self._buffers = torch.empty(station.in_flight, station.most, dtype=torch.int64)
        self._expected: list[tuple[Batch, Handle]] = []

    def take(self) -> int:
        """See `TokenReturn`."""
        return self._oldest() if len(self._expected) == len(self._buffers) else 0

    def expect(self, batch: Batch) -> None:
        """See `TokenReturn`."""
        into = self._buffers[batch.step % len(self._buffers), : batch.rows]
        self._expected.append((batch, self._wire.irecv(into, self._last)))

    def drain(self) -> int:
        """See `TokenReturn`."""
        return sum(self._oldest() for _ in list(self._expected))

    def _oldest(self) -> int:
        batch, handle = self._expected.pop(0)
        handle.result()
        tokens = self._buffers[batch.step % len(self._buffers), : batch.rows]
        return wrong(tokens, batch.step, self._last, TOKENS)


class Last(Between):
    """Samples a token a row, at the end of every step."""

    def __init__(self, station: Station) -> None:
        self._wire = station.wires.open("tokens")
        self._rank = station.rank
        self._buffers = torch.empty(station.in_flight, station.most, dtype=torch.int64)
        self._sent: list[Handle] = []

    def deliver(self, batch: Batch) -> None:
        """See `TokenReturn`."""
        count = len(self._buffers)
        if len(self._sent) == count:
            self._sent.pop(0).result()
        tokens = self._buffers[batch.step % count, : batch.rows]
        stamp(tokens, batch.step, self._rank, TOKENS)
        self._sent.append(self._wire.isend(tokens, 0))

    def drain(self) -> int:
        """See `TokenReturn`."""
        while self._sent:
            self._sent.pop(0).result()
        return 0


class Neither(Between):
    """Opens the wire, as every rank has to."""

    def __init__(self, station: Station) -> None:
        station.wires.open("tokens")


def token_return(station: Station) -> TokenReturn:
    """This stage's part."""
    if station.is_first:
        return First(station)
    return Last(station) if station.is_last else Neither(station)
