"""What a vendor's dispatch and combine have to do, in terms of tensors."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from equipoise.hal.stream import Stream
from equipoise.hal.work import Work
from equipoise.pipeline.expert_exchange.batch import Batch
from equipoise.pipeline.expert_exchange.room import Room


@runtime_checkable
class ExchangeKernels(Protocol):
    """The device's part of an exchange, in rooms that it owns.

    `pack_*` and `unpack_*` launch on `stream` and return: persistent tensors, static shapes, no
    host synchronisation; they may be captured in a graph. `carry_*` sends what was packed, after
    what was launched on `stream`, and is not captured. Kernels that pack and send in one launch do
    it in `pack_*`, and their `carry_*` returns the work that ends with it.

    The caller keeps the order pack, carry, (the work's end,) unpack, and gives a room to the next
    batch only when everything that reads it has been ordered before.
    """

    @property
    def rooms(self) -> tuple[Room, ...]:
        """As many as batches may be in flight."""
        ...

    def pack_rows(self, batch: Batch, room: Room, stream: Stream) -> None:
        """Make ready what goes to other ranks of `batch`; keep where its results will belong."""
        ...

    def carry_rows(self, room: Room, stream: Stream) -> Work:
        """Send it, and receive what the others send."""
        ...

    def unpack_rows(self, room: Room, stream: Stream) -> None:
        """Fill `room.arrivals`, and enter into `room.words` what the headers say."""
        ...

    def pack_results(self, rows: Tensor, room: Room, stream: Stream) -> None:
        """Make ready the results [entries, ...], one an entry of the arrivals."""
        ...

    def carry_results(self, room: Room, stream: Stream) -> Work:
        """Send them where their tokens came from."""
        ...

    def unpack_results(self, tokens: int, room: Room, stream: Stream) -> None:
        """Fill the first `tokens` of `room.results`: zeros where nothing was sent."""
        ...
