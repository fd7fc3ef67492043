"""Blocking rendezvous: one message a tensor; neither side does anything else meanwhile.

The fair variant: shapes are known on both sides, nothing but activations travels, and the tensors
received into are made once.
"""

from handover import Activations, Batch, Station


class There:
    """Activations that have come. See `Received`."""

    def __init__(self, activations: Activations) -> None:
        self._activations = activations

    def read(self) -> Activations:
        """See `Received`."""
        return self._activations

    def release(self) -> None:
        """Nobody writes to them before the next `receive`."""


class Blocking:
    """See `Handover`."""

    messages = 2

    def __init__(self, station: Station) -> None:
        self._rank = station.rank
        self._wire = station.wires.open("blocking")
        self._out, self._in = (Activations.empty(station.most, station.hidden) for _ in range(2))

    def begin(self, batch: Batch) -> None:
        """Nothing is left over from the step before."""

    def receive(self, batch: Batch) -> There:
        """One tensor after the other."""
        taken = self._in.first(batch.rows)
        for tensor in taken:
            self._wire.irecv(tensor, self._rank - 1).result()
        return There(taken)

    def outgoing(self, batch: Batch) -> Activations:
        """Always the same tensors: they have been sent before they are written again."""
        return self._out.first(batch.rows)

    def send(self, batch: Batch, output: Activations) -> None:
        """One tensor after the other."""
        for tensor in output:
            self._wire.isend(tensor, self._rank + 1).result()

    def drain(self) -> None:
        """Every send has ended."""
