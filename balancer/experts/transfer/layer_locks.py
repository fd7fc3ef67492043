"""Locks of layers that are rewritten in place, between steps and the transfer worker."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from types import MappingProxyType

from equipoise.balancer.experts.runtime.jobs import LockReleased
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import EngineError, StreamTimeout
from equipoise.hal.lock import StreamLock
from equipoise.hal.stream import Role
from equipoise.hal.support.slot_access import ReaderRegistry


class EntryCounter:
    """Counts a layer's entries in the two steps that use its lock.

    A layer may be entered several times in a step: several layers of the model share its weights, a
    draft model runs several times, micro-batches follow each other. The lock is acquired at the
    first entry of a step and released at the last exit. The number of entries has to be known
    beforehand, since an exit does not show whether it is the last.

    Any thread may enter and exit.

    Args:
        layer: number of the layer, for errors.
        first: the step that hands the layer over; the next step takes it back.
        entries_per_step: number of entries in each of them.
    """

    def __init__(self, layer: int, first: int, entries_per_step: int) -> None:
        self._layer = layer
        self._first = first
        self._entries = entries_per_step
        self._mutex = threading.Lock()
        self._entered = 0
        self._exited = 0

    def enter(self, step: int, acquire: Callable[[], None]) -> None:
        """Enters; the first entry of a step calls `acquire`, and others wait until it returns.

        Raises:
            EngineError: the previous step was entered less often than registered, or this one more
                often. Also what `acquire` raises. The entry is not counted then.
        """
        with self._mutex:
            before = (step - self._first) * self._entries
            entered = self._entered - before
            if entered < 0 or (entered == 0 and self._exited < before):
                raise self._wrong_count(step - 1)
            if entered >= self._entries:
                raise EngineError(
                    f"layer {self._layer} is entered more than {self._entries} times in step {step}"
                )
            # Within the mutex: no entry of this step may launch reads before the lock is acquired.
            if entered == 0:
                acquire()
            self._entered += 1

    def exit(self, release: Callable[[], None]) -> None:
        """Exits; the last exit of a step calls `release`."""
        with self._mutex:
            self._exited += 1
            if self._exited % self._entries == 0:
                release()

    def check_finished(self) -> None:
        """Raises `EngineError` unless both steps were entered and exited as often as registered."""
        steps_done = self._exited // self._entries
        if steps_done < 2:
            raise self._wrong_count(self._first + steps_done)

    def _wrong_count(self, step: int) -> EngineError:
        """Returns the error: the transfer would wait for ever, or write while a reader reads."""
        before = (step - self._first) * self._entries
        entries, exits = (max(0, count - before) for count in (self._entered, self._exited))
        return EngineError(
            f"layer {self._layer} was entered {entries} times and left {exits} times in step "
            f"{step}, not {self._entries}"
        )


UNLOCKED: AbstractContextManager[None] = nullcontext()
"""The context of a layer that is not being written."""


class StepKind(StrEnum):
    """Which locks a step uses, for engines that capture one graph per kind.

    Source: the modes of TensorRT-LLM's online update, which show that two lock kernels per layer in
    every step cost too much.
    """

    SKIP = "skip"
    """No lock."""
    UPDATE = "update"
    """Some layers are handed to the transfer worker after their last reader of the step."""
    DRAIN = "drain"
    """Layers wait for their new weights, and no further layer is handed over."""


class LayerLocks:
    """The stream locks of all layers, and the steps that use each.

    A layer is rewritten between two steps. In the first, the stream acquires the lock at once,
    reads the old weights and releases it; then the transfer worker writes; in the second, the
    stream waits for the worker and reads the new weights. All other steps use no lock.

    Several streams may read a layer: they start after the compute stream has the lock, and it
    releases the lock after them.

    Args:
        accelerator: makes the locks; its compute stream acquires them.
        layers: number of layers.
        readers: other streams that read slots.
        timeout: seconds that a stream waits before its lock is poisoned.
        entries_per_step: by layer, how often every step enters it; 1 by default.

    Raises:
        Unsupported: the accelerator has no stream locks, or its copies depend on launches.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        layers: int,
        readers: ReaderRegistry,
        timeout: float,
        entries_per_step: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._accelerator = accelerator
        self._compute = accelerator.stream(Role.COMPUTE)
        self._readers = readers
        self._first_steps: Mapping[int, int] = {}
        self._released: Mapping[int, LockReleased] = {}
        self._entry_counters: Mapping[int, EntryCounter] = {}
        self._entries = entries_per_step
        self.locks = tuple(accelerator.stream_lock(timeout) for _ in range(layers))

    def schedule(self, first: Mapping[int, int]) -> None:
        """Sets the step in which each layer is handed over; other layers are not."""
        self._first_steps = dict(first)
        self._released = {layer: LockReleased(self.locks[layer]) for layer in first}
        self._entry_counters = {
            layer: EntryCounter(layer, step, self._entries.get(layer, 1))
            for layer, step in first.items()
        }

    def reading_slots(self, layer: int, step: int) -> AbstractContextManager[None]:
        """Returns the context for everything that a step launches which reads slots of `layer`.

        A layer that is applied several times in a step enters as often as registered.

        Raises:
            EngineError: the steps with its lock did not enter and exit as often; the transfer
                worker may still be writing.
        """
        if self.is_locked(layer, step):
            return self._guard_entry(layer, step)
        self._check_finished(layer, step)
        return UNLOCKED

    def is_locked(self, layer: int, step: int) -> bool:
        """Returns whether `step` uses the lock of `layer`."""
        first = self._first_steps.get(layer)
        return first is not None and first <= step <= first + 1

    def step_kind(self, step: int) -> StepKind:
        """Returns which locks `step` uses."""
        if step in self._first_steps.values():
            return StepKind.UPDATE
        return StepKind.DRAIN if step - 1 in self._first_steps.values() else StepKind.SKIP

    def is_drained(self, layer: int) -> bool:
        """Returns whether the second step of a layer released its lock; then resets the lock."""
        lock, released = self.locks[layer], self._released[layer]
        if not released.ready():
            return False
        # Once: this is asked again until all other layers are released too, in a new epoch then.
        if released.epoch == lock.epoch:
            try:
                lock.drain(0.0)
            except StreamTimeout:
                return False  # released, but a device reaches the point behind the release later
        return True

    def poison(self, layers: Sequence[int]) -> None:
        """Releases every stream that waits for these layers; outputs of their steps are invalid."""
        for layer in layers:
            self.locks[layer].poison()

    def check(self) -> None:
        """Raises `LockPoisoned` if a lock in use was poisoned."""
        for layer in self._first_steps:
            self.locks[layer].check()

    def _check_finished(self, layer: int, step: int) -> None:
        first = self._first_steps.get(layer)
        if first is not None and step > first + 1:
            self._entry_counters[layer].check_finished()

    @contextmanager
    def _guard_entry(self, layer: int, step: int) -> Iterator[None]:
        """Guards an entry. Raises `EngineError` if entries are too many, or were too few before.

        Only calls are counted: a replayed graph makes none, and has its locks captured.
        """
        lock, counter = self.locks[layer], self._entry_counters[layer]
        counter.enter(step, lambda: self._acquire(lock))
        try:
            yield
        finally:
            counter.exit(lambda: self._release(lock))

    def _release(self, lock: StreamLock) -> None:
        # After all readers: once released, the transfer worker writes.
        self._readers.wait_for_readers(self._compute)
        lock.release(self._compute)

    def _acquire(self, lock: StreamLock) -> None:
        """Acquires the lock on the compute stream; other readers start after it."""
        lock.acquire(self._compute)
        waiting_readers = self._readers.wait_for_readers(self._compute)
        if waiting_readers:
            inside = self._accelerator.event()
            self._compute.record(inside)
            self._readers.resume_readers(waiting_readers, inside)
