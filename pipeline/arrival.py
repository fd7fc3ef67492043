"""A message on its way in."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from equipoise.hal.errors import EquipoiseError, MessageMismatch
from equipoise.hal.stream import Event, Role, Stream
from equipoise.pipeline.edge import Edge
from equipoise.pipeline.gathering import Whole
from equipoise.pipeline.header import read_header
from equipoise.pipeline.layout import Layout


@dataclass(frozen=True)
class Awaited:
    """What is to come.

    Attributes:
        edge: over which it comes.
        sequence: messages before it.
        layout: of the class that is expected.
        whole: ends when all tensors are there.
        headers: where the headers come of all messages that the tensors are made from: int64
            [slices, 8]; a fresh view, since whoever keeps one keeps the buffer from being used.
    """

    edge: Edge
    sequence: int
    layout: Layout
    whole: Whole
    headers: Callable[[], Tensor]

    def check(self, headers: Sequence[Sequence[int]]) -> None:
        """Raise `MessageMismatch` unless these announce what is expected.

        Numbers, since an error keeps what was at hand where it was raised: a tensor would keep the
        buffer.
        """
        name = f"{self.edge.name}, message {self.sequence}"
        for words in headers:
            header = read_header(words, name)
            if header.sequence != self.sequence:
                raise MessageMismatch(f"{name}: message {header.sequence} came in its place")
            if header.shape_class != self.layout.shape_class.digest:
                raise MessageMismatch(f"{name}: it is not {self.layout.shape_class}")
            if header.nbytes != self.layout.nbytes:
                nbytes = self.layout.nbytes
                raise MessageMismatch(f"{name}: {header.nbytes} bytes instead of {nbytes}")

    def lost(self) -> bool:
        """Whether it has failed: it will never come, though its buffer may still be written to."""
        if not self.whole.done():
            return False
        try:
            self.whole.result(0.0)
        except EquipoiseError:
            return True
        return False

    def end(self) -> None:
        """Block the host until all tensors are there. Raises `CommunicatorFailed`."""
        began = time.monotonic_ns()
        self.whole.result(self.edge.deadline)
        self.edge.meter.waited(time.monotonic_ns() - began)


class HostArrival:
    """A message into the host's memory: whoever waits blocks, and may read anywhere behind it.

    Attributes:
        awaited: what is to come.
    """

    def __init__(self, awaited: Awaited) -> None:
        self.awaited = awaited
        self._checking = threading.Lock()
        self._checked = False

    def is_completed(self) -> bool:
        """Whether `wait` would come back, or raise, at once."""
        return self.awaited.whole.done()

    def wait(self) -> None:
        """Block until the tensors are there, and are the ones that are expected.

        Raises:
            CommunicatorFailed: the message did not come by the deadline, or its sender is gone.
            MessageMismatch: another message came.
        """
        with self._checking:
            if self._checked:
                return
            self.awaited.end()
            self.awaited.check(self.awaited.headers().tolist())
            self._checked = True

    def settled(self) -> bool:
        """Whether `settle` would come back, or raise, at once."""
        return self.awaited.whole.done()

    def settle(self) -> None:
        """Block the host until nothing of the message is to come. Raises what `wait` raises."""
        self.wait()


class StreamArrival:
    """A message that whoever waits orders the edge's stream behind; the host goes on.

    The host cannot look at a header in a device's memory without stopping for the device. So the
    stream copies it to the host's memory beside the forward, and `settle` looks at it, at the
    latest before the buffer is used again.

    Args:
        awaited: what is to come.
        words: int64 [slices, 8] of the host, where the headers are copied to.
        copied: recorded behind that copy.
    """

    def __init__(self, awaited: Awaited, words: Tensor, copied: Event) -> None:
        self.awaited = awaited
        self._words = words
        self._copied = copied
        self._ordering = threading.Lock()
        self._ordered = False

    def is_completed(self) -> bool:
        """Whether the tensors are there, or never will be."""
        return self.awaited.whole.done()

    def wait(self) -> None:
        """Order the edge's stream behind the message.

        Raises:
            StreamFailed: the edge's stream failed.
            CommunicatorFailed: the message is known to have failed.
        """
        with self._ordering:
            if not self._ordered:
                self.awaited.whole.wait(self.awaited.edge.stream)
                self._fetch_headers(self.awaited.edge.stream)

    def settled(self) -> bool:
        """Whether `settle` would come back, or raise, at once; begins to find out."""
        if not self.awaited.whole.done():
            return False
        self._ask()
        return self._copied.query()

    def settle(self) -> None:
        """Block the host until the message has come, and look at its headers.

        Raises:
            CommunicatorFailed: the message did not come by the deadline, or its sender is gone.
            StreamFailed: the edge's stream failed.
            MessageMismatch: another message came: what was computed from it is to be discarded.
        """
        self.awaited.end()
        self._ask()
        self._copied.synchronize(self.awaited.edge.deadline)
        self.awaited.check(self._words.tolist())

    def _ask(self) -> None:
        """Fetch the headers of a message that no reader has waited for: on a stream of their own,
        since the readers' may be behind later messages by now."""
        with self._ordering:
            if not self._ordered:
                self._fetch_headers(self.awaited.edge.accelerator.stream(Role.AUX))

    def _fetch_headers(self, stream: Stream) -> None:
        stream.launch(self._copy)
        stream.record(self._copied)
        self._ordered = True

    def _copy(self) -> None:
        headers = self.awaited.headers()
        self._words = self._words[: headers.shape[0]]
        self._words.copy_(headers, non_blocking=True)


Arrival = HostArrival | StreamArrival
