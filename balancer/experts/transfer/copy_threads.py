"""Threads that copy expert weights between places of host memory, overlapped with the forward pass.

The threads are native and never hold the GIL. A thread copies a piece at a time, cut at a cache
line of its destination; every thread takes the next one, so a thread that is held up delays no
other. How many there are, and on which processors, follows from the accelerator's topology.
"""

import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from equipoise import _native
from equipoise.balancer.experts.transfer import copy_threads
from equipoise.hal.accelerator import Topology
from equipoise.hal.errors import CopierError, CopyAbandoned, CopyPending
from equipoise.hal.support.numa import NODES, UNKNOWN_NODE, cpulist, listed_cpus

MIN_THREADS, MAX_THREADS = 4, 16


def cpus_of(node: int, root: Path = NODES) -> frozenset[int]:
    """Processors of NUMA node `node`; none where it is `UNKNOWN`.

    Raises:
        CopierError: the system does not list that node, or in a form that is not known.
    """
    if node == UNKNOWN_NODE:
        return frozenset()
    try:
        return listed_cpus(node, root)
    except (OSError, ValueError) as error:
        path = cpulist(node, root)
        raise CopierError(f"NUMA node {node}: cannot read {path}: {error}") from error


def available_cpus() -> frozenset[int]:
    """Processors that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def near_cpus(node: int, allowed: frozenset[int], root: Path = NODES) -> frozenset[int]:
    """Where to pin what copies for an accelerator at `node`; none for anywhere in `allowed`.

    A container may be kept off the accelerator's node: then far processors are better than none.
    """
    return cpus_of(node, root) & allowed


def thread_count(cpus: int, accelerators: int) -> int:
    """Threads that copy for one of `accelerators` which share `cpus` processors.

    Half of its part of the processors, between 4 and 16, as TensorRT-LLM's copy pool; but never
    more than there are, because a copy by threads that take turns is slower than by fewer.
    """
    if cpus < 1 or accelerators < 1:
        raise CopierError(f"no threads for {accelerators} accelerators on {cpus} processors")
    return min(cpus, MAX_THREADS, max(MIN_THREADS, cpus // accelerators // 2))


CACHE_LINE = 64
"""Bytes of a cache line."""
UNLIMITED_RATE = 0.0


@dataclass(frozen=True)
class CopyLimits:
    """How copies share a path with the serving's own traffic.

    Attributes:
        name: for messages.
        chunk_bytes: most bytes that one thread copies without stepping aside; a multiple of 64.
        rate: bytes a second that all threads together begin, `UNLIMITED_RATE` for what they can.
    """

    name: str
    chunk_bytes: int
    rate: float

    def __post_init__(self) -> None:
        if self.chunk_bytes < CACHE_LINE or self.chunk_bytes % CACHE_LINE:
            raise CopierError(
                f"profile {self.name!r}: chunks are multiples of {CACHE_LINE} bytes, "
                f"not {self.chunk_bytes}"
            )
        if not 0.0 <= self.rate < float("inf"):
            raise CopierError(f"profile {self.name!r}: no rate: {self.rate} bytes a second")


PLAIN = CopyLimits("plain", 1 << 20, UNLIMITED_RATE)
"""Nothing to share with: loading, tests. Chunks that are many for a slot, and stay in a cache."""


POLL_SECONDS = 0.1
"""Seconds that a wait lasts without hearing an interrupt."""
CLOSE_TIMEOUT = 10.0
"""Seconds that copies get at the end of a `with` block."""
PENDING, DONE, ABANDONED = range(3)


@dataclass(frozen=True)
class HostCopy:
    """All bytes of `source` to `destination`: C-contiguous, in host memory, equally many bytes.

    A destination must be writable: views of a sealed pool are not.
    """

    source: Tensor
    destination: Tensor


class InFlightBuffers:
    """The operands of what is not copied yet, so that nobody frees them under a thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # A dropped copier is ended, and swept, wherever the garbage collector happens to run.
        self._lock = threading.RLock()
        self._copies: dict[int, tuple[_native.CopyTicket, tuple[HostCopy, ...]]] = {}
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked process: no thread came along, maybe a locked mutex did."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raise `CopierError` in a forked process."""
        if self.is_forked:
            raise CopierError("threads do not come along into a forked process")

    def keep(self, handle: _native.CopyTicket, copies: tuple[HostCopy, ...]) -> int:
        """Hold `copies` until `drop` of the number it returns."""
        with self._lock:
            number = next(self._numbers)
            self._copies[number] = handle, copies
            return number

    def drop(self, number: int) -> None:
        """No thread touches them any more."""
        with self._lock:
            self._copies.pop(number, None)

    def sweep(self) -> None:
        """Drop what has ended, whether or not anybody asked."""
        with self._lock:
            for number, (handle, _) in tuple(self._copies.items()):
                if handle.wait(0.0) != PENDING:
                    self._copies.pop(number, None)

    def __len__(self) -> int:
        return len(self._copies)


class CopyHandle:
    """A list of copies under way; any thread may ask."""

    def __init__(
        self, native: _native.CopyTicket, held: InFlightBuffers, copies: tuple[HostCopy, ...]
    ) -> None:
        self._native = native
        self._buffers = held
        self._number = held.keep(native, copies)

    def done(self) -> bool:
        """Whether it has ended, by success or not."""
        return self._poll(0.0) != PENDING

    def wait(self, timeout: float) -> None:
        """Until every byte is at its destination.

        Raises:
            CopyPending: not within `timeout` seconds; the copy goes on.
            CopyAbandoned: the copier was closed first.
        """
        expiry = time.monotonic() + timeout
        progress = self._poll(min(timeout, POLL_SECONDS))
        while progress == PENDING:
            left = expiry - time.monotonic()
            if left <= 0.0:
                raise CopyPending(f"the copy was not done within {timeout:g} s")
            progress = self._poll(min(left, POLL_SECONDS))
        if progress == ABANDONED:
            raise CopyAbandoned("the copier was closed before the copy ended")

    def _poll(self, seconds: float) -> int:
        self._buffers.check()
        progress = self._native.wait(seconds)
        if progress != PENDING:
            self._buffers.drop(self._number)
        return progress


class CopyThreadPool:
    """A pool of copying threads; any thread may submit.

    Tickets are begun in their order and may end in another. Two that touch the same memory, and
    not only to read it, cannot be under way together: `submit` refuses the second.

    Args:
        limits: how gently to copy.
        threads: how many.
        cpus: where they may run; anywhere if there are none.

    Raises:
        CopierError: no such thread can be had.
    """

    def __init__(
        self, limits: CopyLimits, threads: int, cpus: frozenset[int] = frozenset()
    ) -> None:
        self._limits = limits
        self._threads = threads
        self._cpus = cpus
        self._buffers = InFlightBuffers()
        pins = [sorted(cpus)] * threads
        try:
            self._native = _native.CopyThreads(pins, limits.chunk_bytes, limits.rate)
        except (ValueError, RuntimeError) as error:
            raise CopierError(f"copier {limits.name!r}: {error}") from error
        self._finalizer = weakref.finalize(self, _end, self._native, self._buffers)

    @classmethod
    def near_accelerator(
        cls, topology: Topology, limits: CopyLimits = PLAIN, accelerators: int = 1
    ) -> Self:
        """A copier for one of `accelerators` that share the NUMA node where `topology` says.

        Pinned to that node's processors, as far as this process may use them. Raises
        `CopierError`.
        """
        allowed = copy_threads.available_cpus()
        cpus = copy_threads.near_cpus(topology.numa, allowed)
        return cls(limits, copy_threads.thread_count(len(cpus or allowed), accelerators), cpus)

    @property
    def limits(self) -> CopyLimits:
        """How gently it copies."""
        return self._limits

    @property
    def threads(self) -> int:
        """How many threads copy."""
        return self._threads

    @property
    def cpus(self) -> frozenset[int]:
        """Processors that the threads are pinned to; none if they are not pinned."""
        return self._cpus

    def submit(self, copies: Sequence[HostCopy]) -> CopyHandle:
        """Begin to copy. The ticket, and the copier, own the tensors until the copy ended.

        Raises:
            CopierError: before any effect. A tensor is not plain host memory, or sizes differ;
                a destination overlaps a source, another destination, or memory of a ticket that
                is under way; or the copier is closed.
        """
        self._buffers.check()
        operands = tuple(copies)
        for number, copy in enumerate(operands):
            _check(number, copy)
        rows = np.array([_row(copy) for copy in operands], dtype=np.int64).reshape(-1, 3)
        self._buffers.sweep()
        try:
            return CopyHandle(self._native.submit(rows), self._buffers, operands)
        except ValueError as error:
            raise CopierError(f"refused: {error}") from error

    def close(self, timeout: float) -> None:
        """Take nothing more, let copies end for up to `timeout` seconds, end the threads.

        Raises:
            CopyAbandoned: some had not ended; their tickets say so too.
            CopierError: a thread does not end. What it may touch is never freed.
        """
        self._buffers.check()
        self._finalizer.detach()
        left = _close(self._native, self._buffers, timeout)
        if left:
            raise CopyAbandoned(f"{left} copies had not ended within {timeout:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close(CLOSE_TIMEOUT)
        else:
            self._finalizer()


LEAKED_BUFFERS: list[InFlightBuffers] = []
"""Memory that a thread may still touch after it was told to end."""


def _close(native: _native.CopyThreads, held: InFlightBuffers, timeout: float) -> int:
    try:
        left = native.close(timeout)
    except RuntimeError as error:
        LEAKED_BUFFERS.append(held)
        raise CopierError(str(error)) from error
    held.sweep()
    return left


def _end(native: _native.CopyThreads, held: InFlightBuffers) -> None:
    """When the copier is dropped, or the process ends: nobody frees memory under a thread."""
    if held.is_forked:
        return
    left = _close(native, held, 0.0)
    if left:
        warnings.warn(f"a copier was dropped with {left} copies", ResourceWarning, stacklevel=2)


def _check(number: int, copy: HostCopy) -> None:
    for name, tensor in (("source", copy.source), ("destination", copy.destination)):
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise CopierError(f"copy {number}: its {name} is {tensor.layout} on {tensor.device}")
        if not tensor.is_contiguous():
            raise CopierError(f"copy {number}: its {name} has strides {tensor.stride()}")
    source, destination = copy.source.nbytes, copy.destination.nbytes
    if source != destination:
        raise CopierError(f"copy {number}: {source} bytes do not fit into {destination}")


def _row(copy: HostCopy) -> tuple[int, int, int]:
    return copy.source.data_ptr(), copy.destination.data_ptr(), copy.source.nbytes
