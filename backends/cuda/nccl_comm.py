"""One NCCL communicator, with the CUDA stream that it runs on."""

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from equipoise.backends.common.bounded_wait import poll
from equipoise.backends.cuda.driver_streams import DriverStreamPool
from equipoise.backends.cuda.nccl_api import NCCL_DTYPES, NcclApi, NcclCommHandle, NcclError
from equipoise.backends.devices.runtime import Device
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

Messages: TypeAlias = Sequence[tuple[int, Tensor]]
"""Peers, and what goes to each or comes from it."""


class NcclHandle:
    """One launch.

    Args:
        group: where.
        end: an event of the vendor's after it.
    """

    def __init__(self, group: "NcclComm", end: Any) -> None:
        self._group = group
        self._end = end

    def block_stream(self) -> None:
        """Make the current stream wait for the end."""
        self._end.wait(self._group.current_stream())

    def is_complete(self) -> bool:
        """Whether the device has finished it. Raises if NCCL reports an error: after an error of
        the network the operation may never finish."""
        if self._group.is_reached(self._end):
            return True
        if reason := self._group.error():
            raise NcclError(reason)
        return False

    def error(self) -> str:
        """The asynchronous error that NCCL reports of the communicator; empty if none."""
        return self._group.error()


class NcclComm:
    """An NCCL communicator, which this object owns.

    NCCL ends a small send as soon as it is in a buffer of the receiver, received or not. So each
    message is answered by a byte, in the same launch: a send ends when its receive was launched,
    and one that is never received never ends (clause P3). The messages of a round are not answered:
    they go both ways, and NCCL, which matches by order alone, would take the answer to one for
    another message.

    The communicator is non-blocking: NCCL launches on a thread of its own, which first connects
    what is not connected yet and waits for other ranks. So each launch is waited for, up to the
    deadline, before an event is recorded after it.

    Args:
        api: NCCL.
        comm: its communicator.
        place: this rank, and the size.
        streams: where its own stream comes from.
        device: where it runs.
        deadline: seconds that a launch may take, and that its end may.
    """

    def __init__(
        self,
        api: NcclApi,
        comm: NcclCommHandle,
        place: tuple[int, int],
        streams: DriverStreamPool,
        device: Device,
        deadline: float,
    ) -> None:
        self._api = api
        self._deadline = deadline
        self._comm: NcclCommHandle | None = comm
        self._rank, self._size = place
        self._device = device
        self._streams = streams
        self._driver_stream = streams.take()
        self._guard = threading.Lock()
        self._closed = False
        with device.runtime.current(self.stream):
            self._answer = torch.zeros(1, dtype=torch.int8).to(device.torch)
        # The byte that answers a message, sent or received.

    @property
    def stream(self) -> Any:
        """The CUDA stream that it runs on."""
        return self._driver_stream.stream

    def all_reduce(self, tensor: Tensor) -> NcclHandle:
        """Sum in place."""
        count, kind = tensor.numel(), NCCL_DTYPES[tensor.dtype]
        call = self._api.all_reduce
        return self._launch(lambda comm, to: call(tensor.data_ptr(), count, kind, comm, to))

    def all_gather(self, out: Tensor, tensor: Tensor) -> NcclHandle:
        """Into one tensor."""
        ends, count, kind = _ends(out, tensor), tensor.numel(), NCCL_DTYPES[tensor.dtype]
        return self._launch(lambda comm, to: self._api.all_gather(*ends, count, kind, comm, to))

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> NcclHandle:
        """From one tensor."""
        ends, count, kind = _ends(out, tensor), out.numel(), NCCL_DTYPES[out.dtype]
        return self._launch(lambda comm, to: self._api.reduce_scatter(*ends, count, kind, comm, to))

    def broadcast(self, tensor: Tensor, root: int) -> NcclHandle:
        """From one rank to all."""
        count, kind = tensor.numel(), NCCL_DTYPES[tensor.dtype]
        call = self._api.broadcast
        return self._launch(lambda comm, to: call(tensor.data_ptr(), count, kind, root, comm, to))

    def all_to_all(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> NcclHandle:
        """Messages from all ranks to all, including those of a rank to itself, as one launch."""
        even = [tensor.numel() // self._size] * self._size
        arriving = _parts(out, receives or even)
        leaving = _parts(tensor, sends or even)

        def launch(comm: NcclCommHandle, to: int) -> None:
            with self._api.group(comm):
                self._launch_messages(arriving, leaving, comm, to)

        return self._launch(launch)

    def message(self, operation: str, blob: Tensor, peer: int) -> NcclHandle:
        """A message and its answer, as one launch."""
        there, back = [(peer, blob)], [(peer, self._answer)]
        receives, sends = (there, back) if operation == "irecv" else (back, there)

        def launch(comm: NcclCommHandle, to: int) -> None:
            with self._api.group(comm):
                self._launch_messages(receives, sends, comm, to)

        return self._launch(launch)

    def batch(
        self, operations: Sequence[str], blobs: Sequence[Tensor], peers: Sequence[int]
    ) -> NcclHandle:
        """A round of messages as one launch."""
        messages = list(zip(peers, blobs, strict=True))
        leaving = [
            m for m, operation in zip(messages, operations, strict=True) if operation == "isend"
        ]
        arriving = [
            m for m, operation in zip(messages, operations, strict=True) if operation == "irecv"
        ]

        def launch(comm: NcclCommHandle, to: int) -> None:
            with self._api.group(comm):
                self._launch_messages(arriving, leaving, comm, to)

        return self._launch(launch)

    def abort(self) -> None:
        """End the running kernels, by ncclCommAbort; it blocks, so it runs on a thread of its
        own."""
        self._end(self._api.abort)

    def close(self) -> None:
        """Finalize and destroy; both block, so they run on a thread of their own."""
        self._end(self._finish)

    @property
    def closed(self) -> bool:
        """Whether the abort or the close has ended."""
        return self._closed

    def current_stream(self) -> Any:
        """The calling thread's current stream."""
        return self._device.runtime.current_stream(self._device.index)

    def is_reached(self, event: Any) -> bool:
        """Whether the device has reached an event; also works while a thread captures."""
        with self._device.runtime.allowed_in_capture():
            return bool(event.query())

    def error(self) -> str:
        """The error that NCCL reports; empty once the communicator is released. From any thread,
        also while another one launches."""
        with self._guard:
            return "" if self._comm is None else self._api.async_error(self._comm)

    def _launch_messages(
        self, arriving: Messages, leaving: Messages, comm: NcclCommHandle, to: int
    ) -> None:
        for peer, part in arriving:
            self._api.receive(part.data_ptr(), part.numel(), peer, comm, to)
        for peer, part in leaving:
            self._api.send(part.data_ptr(), part.numel(), peer, comm, to)

    def _launch(self, launch: Callable[[NcclCommHandle, int], None]) -> NcclHandle:
        """Launch on its own stream, after the current one."""
        self._wait_for_current_stream()
        # Under the guard, so that `abort` on another thread cannot free the communicator meanwhile.
        with self._guard:
            launch(self._live_comm(), self._driver_stream.handle)
        if not poll(self._launched, self._deadline):
            raise NcclError(f"NCCL did not launch within {self._deadline:g} s")
        end = self._device.runtime.event()
        end.record(self.stream)
        return NcclHandle(self, end)

    def _launched(self) -> bool:
        """Whether NCCL has launched. One thread at a time, like `error`: NCCL completes a launch
        inside this call."""
        with self._guard:
            return not self._api.in_progress(self._live_comm())

    def _live_comm(self) -> NcclCommHandle:
        if self._comm is None:
            raise NcclError("the communicator was given back")
        return self._comm

    def _finish(self, comm: NcclCommHandle) -> None:
        """Finalize, wait, destroy; abort if finalizing fails or takes longer than the deadline."""
        try:
            self._api.finalize(comm)
            if not poll(lambda: not self._api.in_progress(comm), self._deadline):
                raise NcclError(f"NCCL did not finalize within {self._deadline:g} s")
        except NcclError:
            self._api.abort(comm)
        else:
            self._api.destroy(comm)

    def _wait_for_current_stream(self) -> None:
        """Make its own stream wait for what was launched on the current one."""
        ready = self._device.runtime.event()
        ready.record(self.current_stream())
        ready.wait(self.stream)

    def _end(self, release: Callable[[NcclCommHandle], None]) -> None:
        # Taken out first: from here on no other call reaches NCCL, and a second end does nothing.
        with self._guard:
            comm, self._comm = self._comm, None
        if comm is None:
            return

        def run() -> None:
            self._device.set_current()
            try:
                release(comm)
            except NcclError:
                pass  # nothing is left to try, and no caller waits for the result
            finally:
                self._streams.give(self._driver_stream)
                self._closed = True

        threading.Thread(
            target=NATIVE_CALL_GUARD(run), name="equipoise.nccl.end", daemon=True
        ).start()


def _ends(out: Tensor, tensor: Tensor) -> tuple[int, int]:
    return out.data_ptr(), tensor.data_ptr()


def _parts(tensor: Tensor, sizes: Sequence[int]) -> list[tuple[int, Tensor]]:
    """The part of each rank, where it has one."""
    starts = accumulate(sizes, initial=0)
    cuts = zip(range(len(sizes)), starts, sizes, strict=False)
    return [(rank, tensor[start : start + size]) for rank, start, size in cuts if size]
