"""One message on its way."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from equipoise.backends.virtual.arena import Bytes
from equipoise.backends.virtual.moving import Moving, copy, halves
from equipoise.backends.virtual.operation import Native
from equipoise.hal.errors import CommunicatorFailed

if TYPE_CHECKING:
    from equipoise.backends.virtual.network import Network


class Message:
    """One end of a message: the rank's buffer, uint8 [n], and the handle of its operation."""

    __slots__ = ("buffer", "native")

    def __init__(self, native: Native, buffer: Bytes) -> None:
        self.native = native
        self.buffer = buffer


class Transfer(Moving):
    """A send and the receive that it met; both ends end when the bytes have arrived."""

    def __init__(
        self, network: "Network", ranks: tuple[int, ...], send: Message, receive: Message
    ) -> None:
        super().__init__(network, ranks, (receive.native.operation, send.native.operation))
        self._send = send
        self._receive = receive

    def steps(self) -> Iterator[Callable[[], object]]:
        """The bytes in pieces, then both ends; messages of unequal size fail both ends."""
        into, source = self._receive.buffer, self._send.buffer
        if len(into) != len(source):
            yield self._refuse
            return
        for part in halves(len(source)):
            yield partial(copy, into, source, part)
        yield self._receive.native.end
        yield self._send.native.end

    def _refuse(self) -> None:
        sent, room = len(self._send.buffer), len(self._receive.buffer)
        for operation in self.operations:
            text = f"{operation.what}: {sent} bytes were sent where {room} were awaited"
            operation.drop(CommunicatorFailed, text)
