"""One place of a sending ring: a buffer, and the message that leaves it."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from equipoise.pipeline.buffer import Buffer, host_words
from equipoise.pipeline.departure import Departure
from equipoise.pipeline.edge import Edge
from equipoise.pipeline.header import WORDS, Header
from equipoise.pipeline.layout import Layout, laid
from equipoise.pipeline.packing import Tensors, pack


class Loan(StrEnum):
    """Whether somebody outside has, or may have, tensors over a buffer that is sent from."""

    NONE = "none"
    OPEN = "open"
    """The next message's were handed out, to be written in place."""
    PAST = "past"
    """Those of the last message were, and may still be about."""


@dataclass(frozen=True)
class _Views:
    """Where a message's header and tensors lie in a buffer; to look that up costs more than to
    copy a few rows."""

    layout: Layout
    head: Tensor
    parts: tuple[Tensor, ...]

    @staticmethod
    def of(layout: Layout, memory: Tensor) -> "_Views":
        parts = tuple(place.laid(memory) for place in layout.places)
        return _Views(layout, laid(memory, 0, (1, WORDS), torch.int64), parts)

    @property
    def count(self) -> int:
        return 1 + len(self.parts)


class SendingBerth:
    """A buffer of a sending ring.

    ```text
    free --lend--> lent --send--> packing --> leaving (Departure) --> free
      \\--------------send----------^
    ```

    Args:
        edge: whose ring it is.

    Attributes:
        buffer: where the message is made.
        filled: recorded within the program that packs, behind the packing.
        packed, issued: events of its `Departure`.
        departure: of the last message; None before the first.
        loan: whether tensors over the buffer were handed out.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self.buffer = Buffer(edge.memory)
        self._words = host_words(edge.accelerator)
        self._written = self._words.numpy().data
        self.filled = edge.accelerator.event()
        self.packed, self.issued = edge.accelerator.event(), edge.accelerator.event()
        self.departure: Departure | None = None
        self.loan = Loan.NONE
        self._views: _Views | None = None

    def free(self) -> bool:
        """Whether the last message has left the buffer, and nobody keeps a tensor of it; or it
        never will, which whoever sends hears."""
        if self.departure is None:
            return True
        return self.departure.is_completed() and (self.departure.failed or self.returned())

    def returned(self) -> bool:
        """Whether nobody keeps a tensor of the last message."""
        return self.loan is not Loan.PAST or not self.buffer.held

    def make_room(self, nbytes: int) -> None:
        """Have at least so many bytes."""
        if self.buffer.make_room(nbytes):
            self._views = None

    def lend(self, layout: Layout, nbytes: int) -> dict[str, Tensor]:
        """The tensors of the next message, of `nbytes`, where they will be sent from and of no
        particular content; not those of which only a slice travels."""
        self.make_room(nbytes)
        self.loan = Loan.OPEN
        pairs = zip(layout.places, self._views_of(layout).parts, strict=True)
        return {place.field.name: part.detach() for place, part in pairs if place.parts == 1}

    def leave(self, departure: Departure) -> None:
        """The next message is on its way."""
        self.departure = departure
        self.loan = Loan.PAST if self.loan is Loan.OPEN else Loan.NONE

    def announce(self, header: Header) -> None:
        """Which message comes next."""
        header.write(self._written)

    def fill(self, layout: Layout, tensors: Tensors) -> None:
        """The header, and every tensor that is not there already; in the current stream's order."""
        views = self._views_of(layout)
        views.head.copy_(self._words, non_blocking=True)
        pack(self._edge, layout, tensors, views.parts)

    def _views_of(self, layout: Layout) -> _Views:
        """Made anew where the last message was of another class."""
        views = self._views
        if views is None or views.layout is not layout:
            self.buffer.keep(-views.count if views is not None else 0)
            views = self._views = _Views.of(layout, self.buffer.memory)
            self.buffer.keep(views.count)
        return views
