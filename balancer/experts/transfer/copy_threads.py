"""Host threads that copy expert weights within host memory, overlapped with the forward pass.

The threads are native and never hold the GIL. A thread copies a piece at a time, cut at a cache
line of its destination; every thread takes the next one, so a thread that is held up delays no
other. Their number and processors follow from the accelerator's topology.
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
from equipoise.hal.errors import CopyAbandoned, CopyPending, HostCopyError
from equipoise.hal.support.numa import NODES, UNKNOWN_NODE, cpulist, listed_cpus

MIN_THREADS, MAX_THREADS = 4, 16


def cpus_of(node: int, root: Path = NODES) -> frozenset[int]:
    """Returns the processors of a NUMA node; none if it is `UNKNOWN_NODE`.

    Raises:
        HostCopyError: the system does not list that node, or in an unknown form.
    """
    if node == UNKNOWN_NODE:
        return frozenset()
    try:
        return listed_cpus(node, root)
    except (OSError, ValueError) as error:
        path = cpulist(node, root)
        raise HostCopyError(f"NUMA node {node}: cannot read {path}: {error}") from error


def available_cpus() -> frozenset[int]:
    """Returns the processors that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def near_cpus(node: int, allowed: frozenset[int], root: Path = NODES) -> frozenset[int]:
    """Returns the processors to pin copy threads to; none for anywhere in `allowed`.

    A container may be excluded from the accelerator's node: then any processor is better than none.
    """
    return cpus_of(node, root) & allowed


def thread_count(cpus: int, accelerators: int) -> int:
    """Returns the number of threads for one of `accelerators` that share `cpus` processors.

    Half of its part of the processors, between 4 and 16, as TensorRT-LLM's copy pool; but never
    more than processors: threads that share one copy slower than fewer threads.
    """
    if cpus < 1 or accelerators < 1:
        raise HostCopyError(f"no threads for {accelerators} accelerators on {cpus} processors")
    return min(cpus, MAX_THREADS, max(MIN_THREADS, cpus // accelerators // 2))


CACHE_LINE = 64
"""Bytes of a cache line: pieces are cut there, so that two threads never write one line."""
UNLIMITED_RATE = 0.0


@dataclass(frozen=True)
class CopyLimits:
    """Limits of copies, which share the memory path with serving.

    Attributes:
        name: for messages.
        chunk_bytes: maximum number of bytes that a thread copies at a time; a multiple of 64.
        rate: bytes per second of all threads together, or `UNLIMITED_RATE`.
    """

    name: str
    chunk_bytes: int
    rate: float

    def __post_init__(self) -> None:
        if self.chunk_bytes < CACHE_LINE or self.chunk_bytes % CACHE_LINE:
            raise HostCopyError(
                f"profile {self.name!r}: chunks are multiples of {CACHE_LINE} bytes, "
                f"not {self.chunk_bytes}"
            )
        if not 0.0 <= self.rate < float("inf"):
            raise HostCopyError(f"profile {self.name!r}: no rate: {self.rate} bytes a second")


PLAIN = CopyLimits("plain", 1 << 20, UNLIMITED_RATE)
"""No limit, for loading and tests; a slot has many chunks of 1 MiB, which fit into a cache."""


POLL_SECONDS = 0.1
"""Seconds between checks for an interrupt: the native wait does not notice one."""
CLOSE_TIMEOUT = 10.0
"""Seconds that copies have to end at the end of a `with` block."""
PENDING, DONE, ABANDONED = range(3)


@dataclass(frozen=True)
class HostCopy:
    """A copy of `source` to `destination`: C-contiguous, in host memory, equally many bytes.

    A destination must be writable: views of a sealed pool are not.
    """

    source: Tensor
    destination: Tensor


class InFlightBuffers:
    """Keeps the tensors of unfinished copies alive, while a thread may access them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # Reentrant: the garbage collector may end a dropped pool, and sweep, on a thread that holds
        # the lock.
        self._lock = threading.RLock()
        self._copies: dict[int, tuple[_native.CopyTicket, tuple[HostCopy, ...]]] = {}
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked process, without the threads and perhaps with a locked mutex."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raises `HostCopyError` in a forked process."""
        if self.is_forked:
            raise HostCopyError("threads do not come along into a forked process")

    def keep(self, handle: _native.CopyTicket, copies: tuple[HostCopy, ...]) -> int:
        """Keeps `copies` until `drop` of the returned number."""
        with self._lock:
            number = next(self._numbers)
            self._copies[number] = handle, copies
            return number

    def drop(self, number: int) -> None:
        """Releases copies that no thread accesses any more."""
        with self._lock:
            self._copies.pop(number, None)

    def sweep(self) -> None:
        """Releases all copies that have ended."""
        with self._lock:
            for number, (handle, _) in tuple(self._copies.items()):
                if handle.wait(0.0) != PENDING:
                    self._copies.pop(number, None)

    def __len__(self) -> int:
        return len(self._copies)


class CopyHandle:
    """A handle to copies in progress, for any thread."""

    def __init__(
        self, native: _native.CopyTicket, buffers: InFlightBuffers, copies: tuple[HostCopy, ...]
    ) -> None:
        self._native = native
        self._buffers = buffers
        self._number = buffers.keep(native, copies)

    def done(self) -> bool:
        """Returns whether it has ended, successfully or not."""
        return self._poll(0.0) != PENDING

    def wait(self, timeout: float) -> None:
        """Waits until every byte is copied.

        Raises:
            CopyPending: not within `timeout` seconds; the copy goes on.
            CopyAbandoned: the pool was closed first.
        """
        expiry = time.monotonic() + timeout
        progress = self._poll(min(timeout, POLL_SECONDS))
        while progress == PENDING:
            seconds_left = expiry - time.monotonic()
            if seconds_left <= 0.0:
                raise CopyPending(f"the copy was not done within {timeout:g} s")
            progress = self._poll(min(seconds_left, POLL_SECONDS))
        if progress == ABANDONED:
            raise CopyAbandoned("the copy threads were closed before the copy ended")

    def _poll(self, seconds: float) -> int:
        self._buffers.check()
        progress = self._native.wait(seconds)
        if progress != PENDING:
            self._buffers.drop(self._number)
        return progress


class CopyThreadPool:
    """A pool of copy threads; any thread may submit.

    Copies start in order and may end in another. Two that access the same memory, unless both only
    read it, cannot be in progress together: `submit` refuses the second.

    Args:
        limits: limits of the copies.
        threads: number of threads.
        cpus: processors to pin them to; anywhere if empty.

    Raises:
        HostCopyError: the threads cannot be created.
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
            raise HostCopyError(f"copy threads {limits.name!r}: {error}") from error
        # Its arguments do not refer to the pool, which could otherwise never be dropped.
        self._finalizer = weakref.finalize(self, _end, self._native, self._buffers)

    @classmethod
    def near_accelerator(
        cls, topology: Topology, limits: CopyLimits = PLAIN, accelerators: int = 1
    ) -> Self:
        """Creates a pool for one of `accelerators` that share the NUMA node of `topology`.

        Threads are pinned to that node's processors, as far as this process may use them. Raises
        `HostCopyError`.
        """
        allowed = copy_threads.available_cpus()
        cpus = copy_threads.near_cpus(topology.numa, allowed)
        return cls(limits, copy_threads.thread_count(len(cpus or allowed), accelerators), cpus)

    @property
    def limits(self) -> CopyLimits:
        """The limits of its copies."""
        return self._limits

    @property
    def threads(self) -> int:
        """Number of threads."""
        return self._threads

    @property
    def cpus(self) -> frozenset[int]:
        """Processors that the threads are pinned to; none if they are not pinned."""
        return self._cpus

    def submit(self, copies: Sequence[HostCopy]) -> CopyHandle:
        """Starts copies. Handle and pool keep the tensors alive until the copies have ended.

        Raises:
            HostCopyError: before any effect: a tensor is not plain host memory, or sizes differ; a
                destination overlaps a source, another destination, or memory of a copy in
                progress; or the pool is closed.
        """
        self._buffers.check()
        operands = tuple(copies)
        for number, copy in enumerate(operands):
            _check(number, copy)
        rows = np.array([_row(copy) for copy in operands], dtype=np.int64).reshape(-1, 3)
        # A handle that nobody polls to its end would keep its tensors until the close.
        self._buffers.sweep()
        try:
            return CopyHandle(self._native.submit(rows), self._buffers, operands)
        except ValueError as error:
            raise HostCopyError(f"refused: {error}") from error

    def close(self, timeout: float) -> None:
        """Refuses new copies, waits up to `timeout` seconds for running ones, ends the threads.

        Raises:
            CopyAbandoned: some had not ended; their handles raise it too.
            HostCopyError: a thread does not end. Memory that it may access is never freed.
        """
        self._buffers.check()
        self._finalizer.detach()
        unfinished_copies = _close(self._native, self._buffers, timeout)
        if unfinished_copies:
            raise CopyAbandoned(f"{unfinished_copies} copies had not ended within {timeout:g} s")

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
            # Warns of copies in progress: `CopyAbandoned` would hide the error of the block.
            self._finalizer()


LEAKED_BUFFERS: list[InFlightBuffers] = []
"""Memory that a thread which does not end may still access: never freed."""


def _close(native: _native.CopyThreads, buffers: InFlightBuffers, timeout: float) -> int:
    try:
        unfinished_copies = native.close(timeout)
    except RuntimeError as error:
        LEAKED_BUFFERS.append(buffers)
        raise HostCopyError(str(error)) from error
    buffers.sweep()
    return unfinished_copies


def _end(native: _native.CopyThreads, buffers: InFlightBuffers) -> None:
    """Ends a dropped pool, also at exit, before its memory is freed."""
    if buffers.is_forked:
        return
    unfinished_copies = _close(native, buffers, 0.0)
    if unfinished_copies:
        warnings.warn(
            f"copy threads were dropped with {unfinished_copies} copies",
            ResourceWarning,
            stacklevel=2,
        )


def _check(number: int, copy: HostCopy) -> None:
    for name, tensor in (("source", copy.source), ("destination", copy.destination)):
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise HostCopyError(f"copy {number}: its {name} is {tensor.layout} on {tensor.device}")
        if not tensor.is_contiguous():
            raise HostCopyError(f"copy {number}: its {name} has strides {tensor.stride()}")
    source, destination = copy.source.nbytes, copy.destination.nbytes
    if source != destination:
        raise HostCopyError(f"copy {number}: {source} bytes do not fit into {destination}")


def _row(copy: HostCopy) -> tuple[int, int, int]:
    return copy.source.data_ptr(), copy.destination.data_ptr(), copy.source.nbytes
