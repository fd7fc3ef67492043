"""Mutants of the CPU and gloo: host waits that end too early, silently, or never."""

from collections.abc import Sequence
from contextlib import suppress

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import cpu_with, gloo_with
from torch.distributed import Store  # type: ignore[attr-defined]

from equipoise.backends.cpu.gloo_communicator import GlooCommunicator
from equipoise.backends.cpu.gloo_work import GlooWork
from equipoise.backends.cpu.lock import CpuStreamLock
from equipoise.backends.cpu.stream import CpuEvent, CpuStream
from equipoise.hal.errors import ResultPending, StreamTimeout
from equipoise.hal.support.page_pool import PagePool, PoolPage

SHORT = 0.05
ENDLESS = 60.0


class StreamReturnsAtTimeout(CpuStream):
    """At its time-out a wait for the stream returns as if it had drained."""

    def synchronize(self, timeout: float) -> None:
        with suppress(StreamTimeout):
            super().synchronize(timeout)


class StreamIgnoresTimeout(CpuStream):
    """A wait for the stream takes no notice of its time-out."""

    def synchronize(self, timeout: float) -> None:
        super().synchronize(ENDLESS)


class StreamGivesUpEarly(CpuStream):
    """A wait for the stream gives up after 50 ms."""

    def synchronize(self, timeout: float) -> None:
        super().synchronize(min(timeout, SHORT))


class EventReturnsAtTimeout(CpuEvent):
    """At its time-out a wait for the event returns as if it had been reached."""

    def synchronize(self, timeout: float) -> None:
        with suppress(StreamTimeout):
            super().synchronize(timeout)


class EventIgnoresTimeout(CpuEvent):
    """A wait for the event takes no notice of its time-out."""

    def synchronize(self, timeout: float) -> None:
        super().synchronize(ENDLESS)


class EventGivesUpEarly(CpuEvent):
    """A wait for the event gives up after 50 ms."""

    def synchronize(self, timeout: float) -> None:
        super().synchronize(min(timeout, SHORT))


class EventNeedsTime(CpuEvent):
    """Without any time a wait fails, though the point was reached long ago."""

    def synchronize(self, timeout: float) -> None:
        if timeout <= 0.0:
            raise StreamTimeout("there was no time to look")
        super().synchronize(timeout)


class LockReturnsAtTimeout(CpuStreamLock):
    """At its timeout a writer is admitted."""

    def wait(self, epoch: int, timeout: float) -> None:
        with suppress(StreamTimeout):
            super().wait(epoch, timeout)


class LockGivesUpEarly(CpuStreamLock):
    """A writer gives up after 50 ms."""

    def wait(self, epoch: int, timeout: float) -> None:
        super().wait(epoch, min(timeout, SHORT))


class LockPoisonedEarly(CpuStreamLock):
    """The lock is poisoned after 50 ms, whatever its deadline."""

    def __init__(self, deadline: float) -> None:
        super().__init__(min(deadline, SHORT))


class DrainReturnsAtTimeout(CpuStreamLock):
    """At its time-out the next epoch begins."""

    def drain(self, timeout: float) -> int:
        try:
            return super().drain(timeout)
        except StreamTimeout:
            self._pending_events.clear()
            return super().drain(timeout)


class PoolGivesUpEarly(PagePool):
    """A page is waited for 50 ms at most."""

    def take(self, timeout: float) -> PoolPage:
        return super().take(min(timeout, SHORT))


class PoolRaisesStreamTimeout(PagePool):
    """A page that does not come in time is a stream's time-out."""

    def take(self, timeout: float) -> PoolPage:
        page = self._free()
        if page is None:
            self._await(timeout)
            page = self._free()
        if page is None:
            raise StreamTimeout(f"no page within {timeout:g} s")
        return page


class TimesOutAtFifthOfDeadline(GlooCommunicator):
    """Operations fail after a fifth of their deadline."""

    def __init__(
        self, store: Store, purpose: str, ranks: Sequence[int], rank: int, deadline: float
    ) -> None:
        super().__init__(store, purpose, ranks, rank, deadline / 5)


class ResultReturnsAtTimeout(GlooWork):
    """At its time-out a result is there."""

    def result(self, timeout: float) -> None:
        with suppress(ResultPending):
            super().result(timeout)


class ResultIgnoresTimeout(GlooWork):
    """A result takes no notice of its time-out."""

    def result(self, timeout: float) -> None:
        super().result(ENDLESS)


VAIN = "a-wait-raises-at-its-timeout"
LASTS = "a-wait-does-not-raise-before-its-timeout"
SOFT = "result-timeout-does-not-cancel-the-operation"
MUTANTS = (
    Mutant(
        name="a-stream-drains-at-its-time-out",
        clause="E11",
        broken="A wait for a stream returns at its time-out as if all were well.",
        property=VAIN,
        subject=cpu_with(stream=StreamReturnsAtTimeout),
        real=True,
    ),
    Mutant(
        name="a-stream-is-waited-for-without-end",
        clause="E11",
        broken="A wait for a stream takes no notice of its time-out.",
        property=VAIN,
        subject=cpu_with(stream=StreamIgnoresTimeout),
        real=True,
    ),
    Mutant(
        name="a-stream-is-given-50-ms",
        clause="E11",
        broken="A wait for a stream gives up long before its time-out.",
        property=LASTS,
        subject=cpu_with(stream=StreamGivesUpEarly),
        real=True,
    ),
    Mutant(
        name="an-event-is-reached-at-its-time-out",
        clause="E11",
        broken="A wait for an event returns at its time-out as if all were well.",
        property=VAIN,
        subject=cpu_with(event=EventReturnsAtTimeout),
        real=True,
    ),
    Mutant(
        name="an-event-is-waited-for-without-end",
        clause="E11",
        broken="A wait for an event takes no notice of its time-out.",
        property=VAIN,
        subject=cpu_with(event=EventIgnoresTimeout),
        real=True,
    ),
    Mutant(
        name="an-event-is-given-50-ms",
        clause="E11",
        broken="A wait for an event gives up long before its time-out.",
        property=LASTS,
        subject=cpu_with(event=EventGivesUpEarly),
        real=True,
    ),
    Mutant(
        name="a-wait-without-time-is-in-vain",
        clause="E11",
        broken="A wait without any time fails, though the point was reached long ago.",
        property=VAIN,
        subject=cpu_with(event=EventNeedsTime),
        real=True,
    ),
    Mutant(
        name="the-writer-is-let-in-at-its-time-out",
        clause="E11",
        broken="A writer's wait returns at its time-out, beside the reader.",
        property=VAIN,
        subject=cpu_with(lock=LockReturnsAtTimeout),
        real=True,
    ),
    Mutant(
        name="the-writer-is-given-50-ms",
        clause="E11",
        broken="A writer's wait gives up long before its time-out.",
        property=LASTS,
        subject=cpu_with(lock=LockGivesUpEarly),
        real=True,
    ),
    Mutant(
        name="a-lock-is-poisoned-ahead-of-its-deadline",
        clause="E11",
        broken="A stream waits 50 ms for a signal, whatever the lock's deadline.",
        property=LASTS,
        subject=cpu_with(lock=LockPoisonedEarly),
        real=True,
    ),
    Mutant(
        name="an-epoch-begins-at-the-time-out",
        clause="E11",
        broken="Draining a lock begins the next epoch at its time-out.",
        property=VAIN,
        subject=cpu_with(lock=DrainReturnsAtTimeout),
        real=True,
    ),
    Mutant(
        name="a-page-is-given-50-ms",
        clause="E11",
        broken="A page that comes later than after 50 ms is not waited for.",
        property=LASTS,
        subject=cpu_with(pool=PoolGivesUpEarly),
        real=True,
    ),
    Mutant(
        name="an-empty-pool-is-a-late-stream",
        clause="E11",
        broken="A pool without pages raises the time-out of a stream.",
        property=VAIN,
        subject=cpu_with(pool=PoolRaisesStreamTimeout),
        real=True,
    ),
    Mutant(
        name="operations-have-a-fifth-of-their-deadline",
        clause="E11",
        broken="An operation fails after a fifth of its deadline.",
        property="an-operation-does-not-fail-before-its-deadline",
        subject=gloo_with(communicator=TimesOutAtFifthOfDeadline),
        real=True,
    ),
    Mutant(
        name="a-result-is-there-at-its-time-out",
        clause="E3",
        broken="A soft wait returns at its time-out as if the operation had ended.",
        property=SOFT,
        subject=gloo_with(work=ResultReturnsAtTimeout),
        real=True,
    ),
    Mutant(
        name="a-result-is-waited-for-without-end",
        clause="E3",
        broken="A soft wait lasts until the operation's own deadline.",
        property=SOFT,
        subject=gloo_with(work=ResultIgnoresTimeout),
        real=True,
    ),
)
