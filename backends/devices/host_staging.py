"""A communicator for device tensors over one of the host: copies to page-locked memory and back.

It shares no kernels and no streams with the vendor's collectives, at the price of two copies over
the link between host and device.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from equipoise.backends.devices.memory import record_stream_use
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.communicator import Communicator, Exchange, Fabric, PeerBuffer
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import CommunicatorError, ResultPending, StreamTimeout
from equipoise.hal.stream import Event, Role, Stream
from equipoise.hal.work import Work

Copies = Sequence[tuple[Tensor, Tensor]]
"""Tensors of the device, and the host's copies of them."""


class HostStagedWork:
    """An operation on host copies. Its outputs are copied back by the first call that asks whether
    it has ended: no thread waits for it in the background.

    Args:
        inner: the operation.
        outputs: what it writes.
        accelerator: whose copy stream brings it back.
        deadline: seconds that `wait` may block the host.
    """

    def __init__(
        self, inner: Work, outputs: Copies, accelerator: Accelerator, deadline: float
    ) -> None:
        self._inner = inner
        self._outputs = outputs
        self._accelerator = accelerator
        self._deadline = deadline
        self._copied_back: Event | None = None
        self._copy_lock = threading.Lock()

    def done(self) -> bool:
        """Whether it ended and its outputs are on the device; never blocks."""
        if not self._inner.done():
            return False
        try:
            self._inner.result(0.0)
        except CommunicatorError:
            return True
        return self._copy_back().query()

    def wait(self, stream: Stream) -> None:
        """Make `stream` wait for it. Blocks the host until the operation has ended, because a
        stream of a device cannot wait for the host's communicator. Raises as `result`."""
        self._inner.result(self._deadline)
        stream.wait(self._copy_back())

    def result(self, timeout: float) -> None:
        """Block until the outputs are on the device; raises as `Work.result`."""
        end = time.monotonic() + timeout
        self._inner.result(timeout)
        try:
            self._copy_back().synchronize(max(end - time.monotonic(), 0.0))
        except StreamTimeout as error:
            raise ResultPending(f"outputs are not on the device within {timeout:g} s") from error

    def cancel(self) -> None:
        """See `Work.cancel`."""
        self._inner.cancel()

    def _copy_back(self) -> Event:
        """An event after the copies to the device, which the first caller launches."""
        # Under a lock: two threads that ask at once must not launch the copies twice.
        with self._copy_lock:
            if self._copied_back is None:
                self._copied_back = _copied(self._accelerator, self._outputs)
            return self._copied_back


class HostStagedCommunicator:
    """Collectives and messages of tensors on a device, by a communicator of the host.

    Issuing blocks until the inputs are on the host, so it is for threads that overlap with the
    forward pass. Inputs must be ready when an operation is issued (`stream_ordered` is false).

    Args:
        inner: takes tensors of the host.
        accelerator: whose tensors are given, and whose copy stream and page-locked memory are used.
        deadline: seconds that copies may take.
    """

    def __init__(self, inner: Communicator, accelerator: Accelerator, deadline: float) -> None:
        self._inner = inner
        self._accelerator = accelerator
        self._deadline = deadline

    @property
    def purpose(self) -> str:
        """See `Communicator`."""
        return self._inner.purpose

    @property
    def rank(self) -> int:
        """See `Communicator`."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """See `Communicator`."""
        return self._inner.size

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """Those of the host's communicator; no operation follows a stream."""
        return replace(self._inner.capabilities, stream_ordered=False)

    def all_reduce(self, tensor: Tensor) -> HostStagedWork:
        """See `Communicator`."""
        (host,) = self._to_host(tensor)
        return self._work(self._inner.all_reduce(host), (tensor, host))

    def all_gather(self, out: Tensor, tensor: Tensor) -> HostStagedWork:
        """See `Communicator`."""
        into, (host,) = self._like(out), self._to_host(tensor)
        return self._work(self._inner.all_gather(into, host), (out, into))

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> HostStagedWork:
        """See `Communicator`."""
        into, (host,) = self._like(out), self._to_host(tensor)
        return self._work(self._inner.reduce_scatter(into, host), (out, into))

    def broadcast(self, tensor: Tensor, source: int) -> HostStagedWork:
        """See `Communicator`."""
        (host,) = self._to_host(tensor)
        return self._work(self._inner.broadcast(host, source), (tensor, host))

    def all_to_all(self, out: Tensor, tensor: Tensor) -> HostStagedWork:
        """See `Communicator`."""
        into, (host,) = self._like(out), self._to_host(tensor)
        return self._work(self._inner.all_to_all(into, host), (out, into))

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> HostStagedWork:
        """See `Communicator`."""
        into, (host,) = self._like(out), self._to_host(tensor)
        work = self._inner.all_to_all_uneven(into, host, receives, sends)
        return self._work(work, (out, into))

    def barrier(self) -> HostStagedWork:
        """See `Communicator`."""
        return self._work(self._inner.barrier())

    def isend(self, tensor: Tensor, destination: int) -> HostStagedWork:
        """See `Communicator`."""
        (host,) = self._to_host(tensor)
        return self._work(self._inner.isend(host, destination))

    def irecv(self, tensor: Tensor, source: int) -> HostStagedWork:
        """See `Communicator`."""
        into = self._like(tensor)
        return self._work(self._inner.irecv(into, source), (tensor, into))

    def exchange(self, round: Exchange) -> HostStagedWork:
        """See `Communicator`."""
        host_sends = self._to_host(*(buffer.blob for buffer in round.sends))
        into = [self._like(buffer.blob) for buffer in round.receives]
        staged = Exchange(
            sends=_peer_buffers(round.sends, host_sends),
            receives=_peer_buffers(round.receives, into),
        )
        blobs = [buffer.blob for buffer in round.receives]
        return self._work(self._inner.exchange(staged), *zip(blobs, into, strict=True))

    def warm(self, links: Sequence[tuple[int, int]]) -> None:
        """See `Communicator`."""
        self._inner.warm(links)

    def abort(self) -> None:
        """See `Communicator`."""
        self._inner.abort()

    def rebuild(self, ranks: Sequence[int]) -> None:
        """See `Communicator`."""
        self._inner.rebuild(ranks)

    def close(self) -> None:
        """See `Communicator`."""
        self._inner.close()

    def _to_host(self, *tensors: Tensor) -> list[Tensor]:
        """Copies on the host. Raises `StreamTimeout`, `StreamFailed`."""
        hosts = [self._like(tensor) for tensor in tensors]
        if hosts:
            copies = tuple(zip(hosts, tensors, strict=True))
            _copied(self._accelerator, copies).synchronize(self._deadline)
        return hosts

    def _like(self, tensor: Tensor) -> Tensor:
        """Page-locked memory of that shape and dtype."""
        pinned = self._accelerator.pinned(tensor.numel() * tensor.element_size())
        return pinned.view(tensor.dtype).view(tensor.shape)

    def _work(self, inner: Work, *outputs: tuple[Tensor, Tensor]) -> HostStagedWork:
        return HostStagedWork(inner, outputs, self._accelerator, self._deadline)


class HostStagedFabric:
    """A fabric of the host whose communicators take tensors of a device.

    Args:
        inner: of the host.
        accelerator: see `HostStagedCommunicator`.
        deadline: likewise.
    """

    def __init__(self, inner: Fabric, accelerator: Accelerator, deadline: float) -> None:
        self._inner = inner
        self._accelerator = accelerator
        self._deadline = deadline

    @property
    def control(self) -> ControlPlane:
        """See `Fabric`."""
        return self._inner.control

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> HostStagedCommunicator:
        """See `Fabric`."""
        inner = self._inner.open(purpose, ranks)
        return HostStagedCommunicator(inner, self._accelerator, self._deadline)

    def close(self) -> None:
        """See `Fabric`."""
        self._inner.close()


def _copied(accelerator: Accelerator, copies: Copies) -> Event:
    """Launch copies from the second of each pair to the first; the returned event is after them.

    On the copy stream: the transfer's blobs are allocated, packed and unpacked there, so that
    memory which the allocator reuses is never written by two streams at once.
    """
    stream = accelerator.stream(Role.COPY)

    def program() -> None:
        for to, source in copies:
            to.copy_(source, non_blocking=True)

    stream.launch(program)
    # The caller may drop the tensors before the copies have run (K1).
    record_stream_use(stream, *(tensor for pair in copies for tensor in pair))
    event = accelerator.event()
    stream.record(event)
    return event


def _peer_buffers(buffers: Sequence[PeerBuffer], blobs: Sequence[Tensor]) -> tuple[PeerBuffer, ...]:
    """The same peers, other memory."""
    return tuple(PeerBuffer(buffer.peer, blob) for buffer, blob in zip(buffers, blobs, strict=True))
