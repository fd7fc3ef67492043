"""Locks around layers that are rewritten in place: where a step meets the transfer worker."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from types import MappingProxyType

from equipoise.balancer.experts.runtime.jobs import LockReleased
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import EngineError
from equipoise.hal.lock import StreamLock
from equipoise.hal.stream import Role
from equipoise.hal.support.slot_access import ReaderRegistry


class EntryCounter:
    """Counts a layer's entries in the two steps in which it is handed over and taken back.

    A layer may be entered several times in a step: several layers of the model share its weights,
    a draft runs several times, micro-batches come one after another. The lock is taken at the
    first entry of a step and goes back at the last exit. How many there are is known beforehand,
    since nobody can tell from an exit whether it is the last.

    Any thread may enter and leave.

    Args:
        layer: for errors.
        first: the step that hands the layer over; the next one takes it back.
        entries: in each of them.
    """

    def __init__(self, layer: int, first: int, entries: int) -> None:
        self._layer = layer
        self._first = first
        self._entries = entries
        self._mutex = threading.Lock()
        self._entered = 0
        self._exited = 0

    def enter(self, step: int, take: Callable[[], None]) -> None:
        """Come in; the first of a step takes the lock, and the others wait until it has.

        Raises:
            EngineError: the step before was not entered as often as was registered, or this one
                is entered more often. What `take` raises. Nothing is counted then.
        """
        with self._mutex:
            before = (step - self._first) * self._entries
            here = self._entered - before
            if here < 0 or (here == 0 and self._exited < before):
                raise self._wrong_count(step - 1)
            if here >= self._entries:
                raise EngineError(
                    f"layer {self._layer} is entered more than {self._entries} times in step {step}"
                )
            if here == 0:
                take()
            self._entered += 1

    def exit(self, give_back: Callable[[], None]) -> None:
        """Go out; the last of a step gives the lock back."""
        with self._mutex:
            self._exited += 1
            if self._exited % self._entries == 0:
                give_back()

    def check_finished(self) -> None:
        """Raise `EngineError` unless both steps were entered and left as registered."""
        turns = self._exited // self._entries
        if turns < 2:
            raise self._wrong_count(self._first + turns)

    def _wrong_count(self, step: int) -> EngineError:
        """The mover would wait in vain, or write beside a reader."""
        before = (step - self._first) * self._entries
        entered, left = (max(0, count - before) for count in (self._entered, self._exited))
        return EngineError(
            f"layer {self._layer} was entered {entered} times and left {left} times in step "
            f"{step}, not {self._entries}"
        )


UNLOCKED: AbstractContextManager[None] = nullcontext()
"""The gate of a layer that nobody writes."""


class StepKind(StrEnum):
    """What a step carries beside the forward, for engines that capture one graph a kind.

    Source: the modes of TensorRT-LLM's cadence, whose lesson is that two lock kernels per layer in
    every step cost too much.
    """

    SKIP = "skip"
    """No lock anywhere."""
    UPDATE = "update"
    """Some layer is handed to the mover behind its last reader of the step."""
    DRAIN = "drain"
    """Layers wait for what was written, and no further one is handed over."""


class LayerLocks:
    """Stream locks by layer, and the steps at which each is used.

    A layer is rewritten between two steps: in the first the stream takes the lock at once, reads
    what it has always read, and gives it back; then the mover writes; in the second the stream
    waits for the mover, and reads the new. All other steps pass without a lock.

    Several streams may read a layer: they come in behind the compute stream, and it gives the lock
    back behind them. A layer may be entered several times in a step: the lock is taken at the first
    entry and goes back at the last exit.

    Args:
        accelerator: makes locks; whose compute stream takes them.
        layers: how many.
        readers: other streams that read slots.
        deadline: seconds that a stream waits before its lock is poisoned.
        entries: by layer, how often every step enters it; once where nothing is said.

    Raises:
        Unsupported: the accelerator has no stream locks, or its copies depend on launches.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        layers: int,
        readers: ReaderRegistry,
        deadline: float,
        entries: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._accelerator = accelerator
        self._compute = accelerator.stream(Role.COMPUTE)
        self._readers = readers
        self._first_steps: Mapping[int, int] = {}
        self._released: Mapping[int, LockReleased] = {}
        self._entry_counters: Mapping[int, EntryCounter] = {}
        self._entries = entries
        self.locks = tuple(accelerator.stream_lock(deadline) for _ in range(layers))

    def schedule(self, first: Mapping[int, int]) -> None:
        """From now on each of these layers is handed over in its step `first`, no other is."""
        self._first_steps = dict(first)
        self._released = {layer: LockReleased(self.locks[layer]) for layer in first}
        self._entry_counters = {
            layer: EntryCounter(layer, step, self._entries.get(layer, 1))
            for layer, step in first.items()
        }

    def reading_slots(self, layer: int, step: int) -> AbstractContextManager[None]:
        """Around everything that a step launches that reads the slots of `layer`.

        A layer that is applied several times in a step enters as often as was registered.

        Raises:
            EngineError: the steps that had its lock have not entered and left it so often; the
                mover may still be writing.
        """
        if self.is_locked(layer, step):
            return self._guarded(layer, step)
        self._check_finished(layer, step)
        return UNLOCKED

    def is_locked(self, layer: int, step: int) -> bool:
        """Whether `step` takes the lock of `layer`."""
        first = self._first_steps.get(layer)
        return first is not None and first <= step <= first + 1

    def step_kind(self, step: int) -> StepKind:
        """What `step` carries."""
        if step in self._first_steps.values():
            return StepKind.UPDATE
        return StepKind.DRAIN if step - 1 in self._first_steps.values() else StepKind.SKIP

    def is_drained(self, layer: int) -> bool:
        """Whether the second step of a layer has given its lock back; then it is as at first."""
        lock, released = self.locks[layer], self._released[layer]
        if not released.ready():
            return False
        if released.epoch == lock.epoch:
            lock.drain(0.0)
        return True

    def poison(self, layers: Sequence[int]) -> None:
        """Release every stream that waits for these layers; their steps' outputs are void."""
        for layer in layers:
            self.locks[layer].poison()

    def check(self) -> None:
        """Raise `LockPoisoned` where a lock that is in use was poisoned."""
        for layer in self._first_steps:
            self.locks[layer].check()

    def _check_finished(self, layer: int, step: int) -> None:
        first = self._first_steps.get(layer)
        if first is not None and step > first + 1:
            self._entry_counters[layer].check_finished()

    @contextmanager
    def _guarded(self, layer: int, step: int) -> Iterator[None]:
        """Raises `EngineError` where the layer is entered more, or was less often than it should.

        What is counted are calls: a replayed graph makes none, and carries its locks itself.
        """
        lock, visits = self.locks[layer], self._entry_counters[layer]
        visits.enter(step, lambda: self._take(lock))
        try:
            yield
        finally:
            visits.exit(lambda: self._give_back(lock))

    def _give_back(self, lock: StreamLock) -> None:
        self._readers.wait_for_readers(self._compute)
        lock.release(self._compute)

    def _take(self, lock: StreamLock) -> None:
        """The other readers come in behind the compute stream, which has the lock."""
        lock.acquire(self._compute)
        held = self._readers.wait_for_readers(self._compute)
        if held:
            inside = self._accelerator.event()
            self._compute.record(inside)
            self._readers.resume_readers(held, inside)
