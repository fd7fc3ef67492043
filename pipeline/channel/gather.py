"""Gathering of sliced tensors at the receivers, and the check of them at the senders.

A gather is a collective of the ranks that hold slices. If it ran at the first read of a tensor,
ranks that read in different orders would hang, or mix up tensors. So it is issued when the message
is taken, on the communication stream, after the message.

The slices of several ranks make up a tensor only if all ranks hold the same one. If they do not,
receivers get a tensor that no rank has, and nothing crashes (SGLang issue 30015 is of that kind).
`check_replicated` compares checksums before the first message is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.errors import EquipoiseError, NotReplicated
from equipoise.hal.stream import Role, Stream
from equipoise.hal.work import Work
from equipoise.pipeline.channel.edge import Edge, SliceGroup, as_equipoise_error
from equipoise.pipeline.channel.message import HEADER_BYTES, MessageLayout, Tensors


@dataclass(frozen=True)
class GatherSpec:
    """One gather: this rank's slice, uint8 [n], and the destination, uint8 [slices, n].

    Bytes, since every communicator carries these.
    """

    slice: Tensor
    whole: Tensor


class Completion(Protocol):
    """Completion of everything that fills the tensors of a message; every `Work` is one."""

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        ...

    def result(self, timeout: float) -> None:
        """Block the host until it has ended. Raises the failure, if any."""
        ...

    def wait(self, stream: Stream) -> None:
        """Make `stream` wait for it before whatever is launched next."""
        ...


def gather_specs(layout: MessageLayout, message: Tensor, gathered: Tensor) -> list[GatherSpec]:
    """Return the gathers of a message: its header, then its sliced tensors.

    The headers are gathered, too, because a slice that another rank received may belong to another
    message, which only that rank would see.

    Args:
        layout: of the message.
        message: the buffer that this rank's slices arrive in.
        gathered: uint8 [layout.gathered_nbytes], the destination.
    """
    parts = layout.sliced_fields[0].num_slices
    size = HEADER_BYTES
    headers = GatherSpec(message[:size], gathered[: parts * size].view(parts, size))
    return [
        headers,
        *(
            GatherSpec(field.sent_bytes(message), field.gathered_bytes(gathered))
            for field in layout.sliced_fields
        ),
    ]


def gather(
    edge: Edge, slice_group: SliceGroup, message: Work, parts: Sequence[GatherSpec]
) -> Completion:
    """Begin to gather after the message, on the stream if the communicator follows streams."""
    for _ in parts:
        edge.counters.add_gather()
    if slice_group.gather_communicator.capabilities.stream_ordered:
        return StreamGathering(edge, slice_group, message, parts)
    return HostGathering(edge, slice_group, message, parts)


class StreamGathering:
    """Gathers that are ordered by the communication stream; the host does not wait.

    Args:
        edge: that the slices arrive over.
        slice_group: the ranks that gather.
        message: ends when this rank's slices have arrived.
        parts: the gathers.
    """

    def __init__(
        self, edge: Edge, slice_group: SliceGroup, message: Work, parts: Sequence[GatherSpec]
    ) -> None:
        self._end_event = edge.accelerator.event()
        self._message = message
        comm = edge.accelerator.stream(Role.COMM)
        message.wait(comm)
        with comm.current():
            self._works = [
                slice_group.gather_communicator.all_gather(p.whole, p.slice) for p in parts
            ]
        for work in self._works:
            work.wait(comm)
        comm.record(self._end_event)

    def done(self) -> bool:
        """Whether all of them have ended."""
        return self._message.done() and all(work.done() for work in self._works)

    def result(self, timeout: float) -> None:
        """Block the host until they have. Raises `CommunicatorFailed`, `ResultPending`."""
        self._message.result(timeout)
        for work in self._works:
            work.result(timeout)

    def wait(self, stream: Stream) -> None:
        """Make `stream` wait for them before whatever is launched next."""
        stream.wait(self._end_event)


class HostGathering:
    """Gathers over communicators that do not follow streams.

    A program of the communication stream blocks until the slices have arrived, then issues them.

    Args:
        edge: that the slices arrive over.
        slice_group: the ranks that gather.
        message: ends when this rank's slices have arrived.
        parts: the gathers.
    """

    def __init__(
        self, edge: Edge, slice_group: SliceGroup, message: Work, parts: Sequence[GatherSpec]
    ) -> None:
        self._deadline = edge.deadline
        self._communicator = slice_group.gather_communicator
        self._failure: EquipoiseError | None = None
        self._end_event = edge.accelerator.event()
        comm = edge.accelerator.stream(Role.COMM)
        comm.launch(lambda: self._gather(message, parts))
        comm.record(self._end_event)

    def done(self) -> bool:
        """Whether all of them have ended."""
        return self._end_event.query()

    def result(self, timeout: float) -> None:
        """Block the host until they have.

        Raises:
            CommunicatorFailed: the message, or a gather, failed.
            StreamTimeout: not within `timeout` seconds.
        """
        self._end_event.synchronize(timeout)
        if self._failure is not None:
            raise self._failure

    def wait(self, stream: Stream) -> None:
        """Make `stream` wait for them before whatever is launched next."""
        stream.wait(self._end_event)
        stream.launch(lambda: self.result(self._deadline))

    def _gather(self, message: Work, parts: Sequence[GatherSpec]) -> None:
        """Program of the communication stream. An error fails the message, not the stream."""
        try:
            message.result(self._deadline)
            works = [self._communicator.all_gather(p.whole, p.slice) for p in parts]
            for work in works:
                work.result(self._deadline)
        except Exception as failure:
            self._failure = as_equipoise_error(failure, "slices could not be gathered")


def check_replicated(
    edge: Edge, slice_group: SliceGroup, layout: MessageLayout, tensors: Tensors
) -> None:
    """Compare checksums of sliced tensors among the sending ranks; collective, blocks the host.

    Raises:
        NotReplicated: names the tensors that differ; on all of these ranks.
        CommunicatorFailed: a rank did not take part by the deadline.
    """
    names = [field.field.name for field in layout.sliced_fields]
    checksums = [as_int64(checksum(tensors[name].contiguous())) for name in names]
    own = torch.tensor(checksums, dtype=torch.int64, device=edge.accelerator.device)
    all_checksums = own.new_empty(slice_group.size, len(names))
    slice_group.verify_communicator.all_gather(all_checksums, own).result(edge.deadline)
    differing = (all_checksums != all_checksums[0]).any(0).tolist()
    if any(differing):
        differing_names = ", ".join(
            name for name, differs in zip(names, differing, strict=True) if differs
        )
        raise NotReplicated(
            f"{edge.name}: {differing_names} is declared the same on {slice_group.size} ranks, "
            "and is not: send it whole"
        )
