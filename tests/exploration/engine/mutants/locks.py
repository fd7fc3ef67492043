"""Mutants of the locked path: who waits for whom, and what is looked at."""

from collections.abc import Mapping, Sequence

from exploration.engine.case import Case, FaultKind, Path
from exploration.engine.mutants.mutant import Mutant, with_fault

from equipoise.balancer.experts.engine.in_place_path import InPlacePath
from equipoise.balancer.experts.engine.states import Updating
from equipoise.balancer.experts.placement import Layout
from equipoise.balancer.experts.routing.layer_update import LayerUpdate
from equipoise.balancer.experts.runtime.jobs import Job, LockReleased
from equipoise.balancer.experts.transfer.host_writes import HostWeights
from equipoise.balancer.experts.transfer.layer_locks import LayerLocks
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.lock import StreamLock
from equipoise.hal.slots import SlotStore


class NotDrained(InPlacePath):
    """Ends a rebalance when its tables are installed, whoever still holds a lock."""

    def _locks_drained(self, state: Updating) -> bool:
        return True


class WritesAtOnce(InPlacePath):
    """Writes a layer without waiting for the step that still reads it."""

    def _rewrite(self, update: LayerUpdate, epochs: Mapping[int, int], layout: Layout) -> Job[None]:
        for layer in update.layers:
            yield from self._write_slots(layer, layout.placement)
            yield LockReleased(self._layer_locks.locks[layer])
            self._layer_locks.locks[layer].signal(epochs[layer])


class SignalsFirst(InPlacePath):
    """Lets the next step read, then writes."""

    def _rewrite(self, update: LayerUpdate, epochs: Mapping[int, int], layout: Layout) -> Job[None]:
        for layer in update.layers:
            yield LockReleased(self._layer_locks.locks[layer])
            self._layer_locks.locks[layer].signal(epochs[layer])
            yield from self._write_slots(layer, layout.placement)


class IgnoresErrors(InPlacePath):
    """Goes on when a write has failed: its layer is handed back as it is."""

    def _rewrite(self, update: LayerUpdate, epochs: Mapping[int, int], layout: Layout) -> Job[None]:
        for layer in update.layers:
            yield LockReleased(self._layer_locks.locks[layer])
            try:
                yield from self._write_slots(layer, layout.placement)
            except Exception:
                self._layer_locks.locks[layer].signal(epochs[layer])
                continue
            self._layer_locks.locks[layer].signal(epochs[layer])


class HalfLocks(LayerLocks):
    """Locks the step that hands a layer over, and not the one behind."""

    def is_locked(self, layer: int, step: int) -> bool:
        return self._first_steps.get(layer) == step

    def _check_finished(self, layer: int, step: int) -> None:
        """Believes that all is well."""


class LonelyLocks(LayerLocks):
    """Only the compute stream is behind the lock."""

    def _acquire(self, lock: StreamLock) -> None:
        lock.acquire(self._compute)

    def _release(self, lock: StreamLock) -> None:
        lock.release(self._compute)


class DrainsWhenReleased(LayerLocks):
    """Takes a lock whose release was seen for one behind which nothing is on its way."""

    def is_drained(self, layer: int) -> bool:
        lock, released = self.locks[layer], self._released[layer]
        if not released.ready():
            return False
        if released.epoch == lock.epoch:
            lock.drain(0.0)
        return True


def unchecked(
    accelerator: Accelerator,
    store: SlotStore,
    host_weights: HostWeights,
    layer: int,
    slots: Sequence[int],
    experts: Sequence[int],
) -> Job[None]:
    """Write, and believe it."""
    if slots:
        sources = [host_weights.source.view(layer, expert) for expert in experts]
        yield from host_weights.writer.write(slots, sources)


def has_locks_and_lookahead(case: Case) -> bool:
    """Of the path with locks, where a host may be at the next boundary before its device ends."""
    return case.path is not Path.STAGED and case.ahead > 0


MUTANTS = (
    Mutant(
        name="late-signal-of-a-lock",
        broken="a rebalance ends while its writes may still signal",
        property="explained",
        patches={"balancer.InPlacePath": NotDrained},
    ),
    Mutant(
        name="written-while-read",
        broken="a layer is written while a step reads it",
        property="right-weights",
        patches={"balancer.InPlacePath": WritesAtOnce},
    ),
    Mutant(
        name="signal-before-write",
        broken="a step may read a layer that is yet to be written",
        property="right-weights",
        patches={"balancer.InPlacePath": SignalsFirst},
    ),
    Mutant(
        name="write-error-ignored",
        broken="a layer whose writing failed is handed back as it is",
        property="right-weights",
        patches={"balancer.InPlacePath": IgnoresErrors},
        reaches=with_fault(FaultKind.WRITE_FAILS),
    ),
    Mutant(
        name="write-not-checked",
        broken="nobody looks at what was written",
        property="right-weights",
        patches={"engine.in_place_path.write_and_verify": unchecked},
    ),
    Mutant(
        name="half-a-gate",
        broken="the step after the hand-over does not wait for the transfer worker",
        property="right-weights",
        patches={"balancer.LayerLocks": HalfLocks},
    ),
    Mutant(
        name="drained-when-released",
        broken="the next epoch is to begin as soon as a release is seen",
        property="explained",
        patches={"balancer.LayerLocks": DrainsWhenReleased},
        reaches=has_locks_and_lookahead,
    ),
    Mutant(
        name="reader-past-the-gate",
        broken="attached streams read without the lock",
        property="right-weights",
        patches={"balancer.LayerLocks": LonelyLocks},
    ),
)
