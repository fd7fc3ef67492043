"""The tensors that a stage is handed while they are still on their way.

The constructor, and what is read how, follow `AsyncIntermediateTensors` of vLLM (pull request
33368), so that a model's forward takes either. What differs: a failure stays a failure, however
often one reads; reading is an ordinary property, which `torch.compile` can follow; and the memory
is leased.
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
    """An operation that fills some of the tensors; may have `is_completed() -> bool` besides."""

    def wait(self) -> object:
        """Come back when whoever calls may read; called once."""
        ...


@runtime_checkable
class Pollable(Protocol):
    """A handle that can say whether `wait` would block."""

    def is_completed(self) -> bool:
        """Whether it would not."""
        ...


class BufferLease(Protocol):
    """What keeps the memory of the tensors from being used again."""

    def release(self) -> None:
        """Nothing that is launched from now on reads the tensors."""
        ...


@dataclass(frozen=True)
class CommPending:
    """Nobody has waited yet."""

    handles: tuple[CommHandle, ...]
    postprocess: tuple[Callable[[], object], ...]


@dataclass(frozen=True)
class CommDone:
    """All waits and all post-processing are over."""


@dataclass(frozen=True)
class CommFailed:
    """A wait or a post-processing raised; every read raises it again."""

    error: Exception


@dataclass(frozen=True)
class LeaseReleased:
    """The lease is over."""


CommState = CommPending | CommDone | CommFailed | LeaseReleased
_ticket_numbers = itertools.count()
_under_way: "weakref.WeakValueDictionary[int, AsyncIntermediateTensors]" = (
    weakref.WeakValueDictionary()
)


class AsyncIntermediateTensors:
    """A mapping of tensors of which some are still being received (clause P5).

    The first read of anything waits for all handles, in their order, then runs the
    post-processing, each once; whatever one of them raises is raised by that read and by all
    others. Any thread may read. `torch.compile(fullgraph=True)` follows a read: waiting becomes an
    operation of the graph, `await_arrival`.

    Args:
        tensors: by name. Engines put numbers and words beside them, which are handed on.
        comm_handles: what fills them; None or empty where they are there.
        comm_postprocess: called behind the waits, with no arguments; None for nothing.
        lease: of their memory; None where it is nobody else's.
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
        number = next(_ticket_numbers)
        self._ticket = torch.tensor(number)
        _under_way[number] = self

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them, by name; waits. Raises what `wait_for_comm` raises."""
        if torch.compiler.is_compiling():
            await_arrival(self._ticket, [self._tensors[name] for name in self._names])
        else:
            self.wait_for_comm()
        return self._tensors

    def wait_for_comm(self) -> None:
        """Wait and post-process, unless that has been done.

        Raises:
            LeaseEnded: `release` was called.
            Exception: whatever a handle or the post-processing raised, now or at an earlier read.
        """
        with self._reading:
            if isinstance(self._state, CommPending):
                self._state = _outcome(self._state)
                if isinstance(self._state, CommFailed):
                    self._let_go()  # whoever keeps the error keeps this, and nothing is to be read
            if isinstance(self._state, CommFailed):
                raise self._state.error
            if isinstance(self._state, LeaseReleased):
                raise LeaseEnded("these tensors were released: others may be in their memory")

    def ready(self) -> bool:
        """Whether a read would return, or raise, at once. False where a handle cannot say."""
        state = self._state
        if not isinstance(state, CommPending):
            return True
        return all(isinstance(h, Pollable) and h.is_completed() for h in state.handles)

    def release(self) -> None:
        """End the lease: nothing launched from now on reads the tensors.

        Waits for nothing but a read that is under way in another thread.
        """
        with self._reading:
            if isinstance(self._state, LeaseReleased):
                return
            self._state = LeaseReleased()
            self._let_go()

    def _let_go(self) -> None:
        self._tensors = {}
        if self._lease is not None:
            self._lease.release()

    @overload
    def __getitem__(self, key: str) -> Tensor: ...

    @overload
    def __getitem__(self, key: slice) -> "AsyncIntermediateTensors": ...

    def __getitem__(self, key: str | slice) -> "Tensor | AsyncIntermediateTensors":
        """One tensor; or, for a slice, every tensor's rows of it, in a mapping that has arrived."""
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
        """Names and tensors; waits."""
        return self.tensors.items()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AsyncIntermediateTensors):
            return NotImplemented
        mine, theirs = self.tensors, other.tensors
        return mine.keys() == theirs.keys() and all(_same(mine[n], theirs[n]) for n in mine)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """Does not wait: whoever looks on must not change what happens."""
        if isinstance(self._state, CommDone):
            return f"AsyncIntermediateTensors({self._tensors!r})"
        return f"AsyncIntermediateTensors({sorted(self._tensors)}, {type(self._state).__name__})"


@torch.library.custom_op("equipoise::await_arrival", mutates_args=("tensors",))
def await_arrival(ticket: Tensor, tensors: list[Tensor]) -> None:
    """Wait until the mapping of `ticket` has its tensors: a read, as an operation of a graph.

    A compiler that rewrites mutations hands in copies made before the wait, and post-processing may
    put other tensors in their place: what was handed in is filled from what the mapping holds then.

    Args:
        ticket: int64 [], in the host's memory.
        tensors: of the mapping, in its order, or copies of them.

    Raises:
        LeaseEnded: nobody holds the mapping any more, or it was released.
        ShapeClassError: post-processing has changed a shape, which the graph cannot follow: read
            once before what is compiled.
    """
    mapping = _under_way.get(int(ticket))
    if mapping is None:
        raise LeaseEnded("the mapping that these tensors were read from is gone")
    held = mapping.tensors
    arrived = [held[name] for name in mapping._names if name in held]
    if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in arrived]:
        raise ShapeClassError("post-processing changed shapes behind the back of a compiled graph")
    for given, own in zip(tensors, arrived, strict=True):
        if given.data_ptr() != own.data_ptr():
            given.copy_(own)


@await_arrival.register_fake
def _shapes_of_arrival(ticket: Tensor, tensors: list[Tensor]) -> None:
    """Nothing changes its shape."""


def _outcome(pending: CommPending) -> CommDone | CommFailed:
    try:
        for handle in pending.handles:
            handle.wait()
        for process in pending.postprocess:
            process()
    except Exception as error:  # kept for every read to come; an interrupt is no outcome
        return CommFailed(error)
    return CommDone()


def _same(mine: object, theirs: object) -> bool:
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return torch.equal(mine, theirs)
    return not isinstance(mine, Tensor) and mine == theirs
