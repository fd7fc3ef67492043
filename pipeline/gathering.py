"""Slices become tensors: at a defined point, in the order of the messages.

A gather is a collective of the ranks that hold slices. If it ran where somebody first reads a
tensor, ranks that read in another order would hang, or mix tensors up. So it is issued when the
message is taken, on the communication stream, behind the message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from equipoise.hal.errors import EquipoiseError
from equipoise.hal.stream import Role, Stream
from equipoise.hal.work import Work
from equipoise.pipeline.edge import Edge, Slices
from equipoise.pipeline.failures import explained
from equipoise.pipeline.header import HEADER_BYTES
from equipoise.pipeline.layout import Layout


@dataclass(frozen=True)
class Part:
    """One tensor, as bytes, which every communicator carries: this rank's slice [n], and where the
    whole goes [parts, n]."""

    slice: Tensor
    whole: Tensor


class Whole(Protocol):
    """The end of everything that fills the tensors of a message; a `Work` is one, too."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def result(self, timeout: float) -> None:
        """Block the host until then. Raises what went wrong."""
        ...

    def wait(self, stream: Stream) -> None:
        """Order what is launched on `stream` from now on behind it."""
        ...


def layer_group_specs(layout: Layout, message: Tensor, wholes: Tensor) -> list[Part]:
    """What is gathered of a message: the header, since a slice that another rank received may be
    of another message, which only that rank would see; then the tensors.

    Args:
        layout: of the message.
        message: where the slices come.
        wholes: uint8 [layout.gathered_nbytes], where the tensors go.
    """
    parts = layout.sliced[0].parts
    size = HEADER_BYTES
    headers = Part(message[:size], wholes[: parts * size].view(parts, size))
    return [
        headers,
        *(Part(p.bytes_of(message), p.gathered_bytes(wholes)) for p in layout.sliced),
    ]


def gather(edge: Edge, slices: Slices, message: Work, parts: Sequence[Part]) -> Whole:
    """Begin to gather, behind the message; in the way that the slices' communicator allows."""
    for _ in parts:
        edge.meter.gather()
    if slices.gathering.capabilities.stream_ordered:
        return StreamGathering(edge, slices, message, parts)
    return HostGathering(edge, slices, message, parts)


class StreamGathering:
    """Gathers that follow the communication stream; the host does not wait.

    Args:
        edge: over which the slices come.
        slices: the ranks that gather.
        message: ends when this rank's slices are there.
        parts: what is gathered.
    """

    def __init__(self, edge: Edge, slices: Slices, message: Work, parts: Sequence[Part]) -> None:
        self._passed = edge.accelerator.event()
        self._message = message
        comm = edge.accelerator.stream(Role.COMM)
        message.wait(comm)
        with comm.current():
            self._works = [slices.gathering.all_gather(p.whole, p.slice) for p in parts]
        for work in self._works:
            work.wait(comm)
        comm.record(self._passed)

    def done(self) -> bool:
        """Whether all of them have ended."""
        return self._message.done() and all(work.done() for work in self._works)

    def result(self, timeout: float) -> None:
        """Block the host until they have. Raises `CommunicatorFailed`, `ResultPending`."""
        self._message.result(timeout)
        for work in self._works:
            work.result(timeout)

    def wait(self, stream: Stream) -> None:
        """Order what is launched on `stream` from now on behind them."""
        stream.wait(self._passed)


class HostGathering:
    """Gathers for communicators that follow no stream: a program of the communication stream
    blocks until the slices are there, and then issues them.

    Args:
        edge: over which the slices come.
        slices: the ranks that gather.
        message: ends when this rank's slices are there.
        parts: what is gathered.
    """

    def __init__(self, edge: Edge, slices: Slices, message: Work, parts: Sequence[Part]) -> None:
        self._deadline = edge.deadline
        self._communicator = slices.gathering
        self._failure: EquipoiseError | None = None
        self._passed = edge.accelerator.event()
        comm = edge.accelerator.stream(Role.COMM)
        comm.launch(lambda: self._gather(message, parts))
        comm.record(self._passed)

    def done(self) -> bool:
        """Whether all of them have ended."""
        return self._passed.query()

    def result(self, timeout: float) -> None:
        """Block the host until they have.

        Raises:
            CommunicatorFailed: the message, or a gather, failed.
            StreamTimeout: not within `timeout` seconds.
        """
        self._passed.synchronize(timeout)
        if self._failure is not None:
            raise self._failure

    def wait(self, stream: Stream) -> None:
        """Order what is launched on `stream` from now on behind them."""
        stream.wait(self._passed)
        stream.launch(lambda: self.result(self._deadline))

    def _gather(self, message: Work, parts: Sequence[Part]) -> None:
        """A program of the communication stream. What fails fails the message, not the stream."""
        try:
            message.result(self._deadline)
            works = [self._communicator.all_gather(p.whole, p.slice) for p in parts]
            for work in works:
                work.result(self._deadline)
        except Exception as failure:
            self._failure = explained(failure, "slices could not be gathered")
