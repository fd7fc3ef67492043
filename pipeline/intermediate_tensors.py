"""Tensors that a pipeline stage gets while they are still being received.

The constructor and the ways of reading follow `AsyncIntermediateTensors` of vLLM (pull request
33368), so that a model's forward takes either. The differences: after a failure every read fails;
reading is an ordinary property, which `torch.compile` can trace; and the memory is leased.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, ItemsView, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload, runtime_checkable

import torch
from torch import Tensor

from equipoise.hal.errors import LeaseEnded, ShapeClassError


class CommHandle(Protocol):
    """An operation that fills some of the tensors; it may also have `is_completed() -> bool`."""

    def wait(self) -> object:
        """Return when the caller may read the tensors; called once."""
        ...


@runtime_checkable
class Pollable(Protocol):
    """A handle that knows whether `wait` would block."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        ...


class BufferLease(Protocol):
    """Keeps the memory of the tensors from being reused."""

    def release(self) -> None:
        """Declare that nothing launched from now on reads the tensors."""
        ...


@dataclass(frozen=True)
class CommPending:
    """No read has waited yet."""

    handles: tuple[CommHandle, ...]
    postprocess: tuple[Callable[[], object], ...]


@dataclass(frozen=True)
class CommDone:
    """All handles have been waited for, and post-processing has run."""


@dataclass(frozen=True)
class CommFailed:
    """A handle or post-processing raised; every read raises it again."""

    error: Exception


@dataclass(frozen=True)
class LeaseReleased:
    """The lease was released."""


CommState = CommPending | CommDone | CommFailed | LeaseReleased
_mapping_ids = itertools.count()
_live_mappings: "weakref.WeakValueDictionary[int, AsyncIntermediateTensors]" = (
    weakref.WeakValueDictionary()
)


class AsyncIntermediateTensors:
    """A mapping of tensors of which some are still being received (clause P5).

    The first read of any tensor waits for all handles in order, then runs the post-processing; each
    once. What one of them raises is raised by this read and all later ones. Any thread may read.
    `torch.compile(fullgraph=True)` can trace a read: waiting becomes an operator of the graph,
    `equipoise::wait_for_comm`.

    Args:
        tensors: by name. Engines also put numbers and strings there, which are passed on.
        comm_handles: the operations that fill them; None or empty if they are complete.
        comm_postprocess: called without arguments after the waits; None for nothing.
        lease: of their memory; None if the memory is not reused.
    """

    def __init__(
        self,
        tensors: dict[str, Any],
        comm_handles: Sequence[CommHandle] | None = None,
        comm_postprocess: Sequence[Callable[[], object]] | None = None,
        *,
        lease: BufferLease | None = None,
    ) -> None:
        self._tensors: dict[str, Tensor] = tensors
        self._names = [name for name, value in tensors.items() if isinstance(value, Tensor)]
        self._lease = lease
        self._state: CommState = CommPending(
            tuple(comm_handles or ()), tuple(comm_postprocess or ())
        )
        self._reading = threading.RLock()
        mapping_id = next(_mapping_ids)
        self._mapping_id = torch.tensor(mapping_id)
        _live_mappings[mapping_id] = self

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name; waits for them. Raises what `wait_for_comm` raises."""
        if torch.compiler.is_compiling():
            wait_for_comm_op(self._mapping_id, [self._tensors[name] for name in self._names])
        else:
            self.wait_for_comm()
        return self._tensors

    def wait_for_comm(self) -> None:
        """Wait for all handles and run the post-processing, unless that has been done.

        Raises:
            LeaseEnded: `release` was called.
            Exception: what a handle or the post-processing raised, now or at an earlier read.
        """
        with self._reading:
            if isinstance(self._state, CommPending):
                self._state = _outcome(self._state)
                if isinstance(self._state, CommFailed):
                    # Whoever keeps the error keeps this mapping; its buffer must not wait for that.
                    self._drop_tensors()
            if isinstance(self._state, CommFailed):
                raise self._state.error
            if isinstance(self._state, LeaseReleased):
                raise LeaseEnded("these tensors were released: their memory may hold others")

    def ready(self) -> bool:
        """Whether a read would return or raise at once. False if a handle does not know."""
        state = self._state
        if not isinstance(state, CommPending):
            return True
        return all(isinstance(h, Pollable) and h.is_completed() for h in state.handles)

    def release(self) -> None:
        """End the lease: nothing launched from now on may read the tensors.

        Waits only for a read that is in progress in another thread.
        """
        with self._reading:
            if isinstance(self._state, LeaseReleased):
                return
            self._state = LeaseReleased()
            self._drop_tensors()

    def _drop_tensors(self) -> None:
        self._tensors = {}
        if self._lease is not None:
            self._lease.release()

    @overload
    def __getitem__(self, key: str) -> Tensor: ...

    @overload
    def __getitem__(self, key: slice) -> "AsyncIntermediateTensors": ...

    def __getitem__(self, key: str | slice) -> "Tensor | AsyncIntermediateTensors":
        """One tensor; or, for a slice, these rows of every tensor, in a mapping that is
        complete."""
        tensors = self.tensors
        if isinstance(key, str):
            return tensors[key]
        rows = {n: t[key] if isinstance(t, Tensor) else t for n, t in tensors.items()}
        return AsyncIntermediateTensors(rows)

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.tensors[key] = value

    def __contains__(self, key: str) -> bool:
        return key in self.tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def items(self) -> ItemsView[str, Tensor]:
        """Names and tensors; waits for them."""
        return self.tensors.items()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AsyncIntermediateTensors):
            return NotImplemented
        own, other_tensors = self.tensors, other.tensors
        return own.keys() == other_tensors.keys() and all(
            _same(own[n], other_tensors[n]) for n in own
        )

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """Does not wait, so that printing (in a debugger, say) changes nothing."""
        if isinstance(self._state, CommDone):
            return f"AsyncIntermediateTensors({self._tensors!r})"
        return f"AsyncIntermediateTensors({sorted(self._tensors)}, {type(self._state).__name__})"


@torch.library.custom_op("equipoise::wait_for_comm", mutates_args=("tensors",))
def wait_for_comm_op(mapping_id: Tensor, tensors: list[Tensor]) -> None:
    """Wait until the tensors of a mapping have arrived: a read, as an operator of a graph.

    A compiler that rewrites mutations passes copies made before the wait, and post-processing may
    replace tensors in the mapping. So the arguments are filled from what the mapping holds after
    the wait.

    Args:
        mapping_id: int64 [], in host memory.
        tensors: those of the mapping, in its order, or copies of them.

    Raises:
        LeaseEnded: the mapping was dropped or released.
        ShapeClassError: post-processing has changed a shape, which the graph cannot follow. Read
            once before the compiled region.
    """
    mapping = _live_mappings.get(int(mapping_id))
    if mapping is None:
        raise LeaseEnded("the mapping of these tensors was dropped")
    tensors_by_name = mapping.tensors
    arrived = [tensors_by_name[name] for name in mapping._names if name in tensors_by_name]
    if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in arrived]:
        raise ShapeClassError("post-processing changed shapes that a compiled graph relies on")
    for target, source in zip(tensors, arrived, strict=True):
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)


@wait_for_comm_op.register_fake
def _fake_wait_for_comm(mapping_id: Tensor, tensors: list[Tensor]) -> None:
    """Shapes stay as they are."""


def _outcome(pending: CommPending) -> CommDone | CommFailed:
    try:
        for handle in pending.handles:
            handle.wait()
        for process in pending.postprocess:
            process()
    except Exception as error:  # kept for later reads; an interrupt is not an outcome
        return CommFailed(error)
    return CommDone()


def _same(own: object, other: object) -> bool:
    if isinstance(own, Tensor) and isinstance(other, Tensor):
        return torch.equal(own, other)
    return not isinstance(own, Tensor) and own == other
