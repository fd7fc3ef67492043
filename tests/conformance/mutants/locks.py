"""Mutants of family *locks*."""

from collections.abc import Callable, Sequence

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import device_with
from torch import Tensor

from equipoise.backends.virtual.lock import VirtualStreamLock
from equipoise.backends.virtual.scheduling import StreamTask, _no_deadline, in_turn
from equipoise.backends.virtual.slots import VirtualSlotStore
from equipoise.backends.virtual.stream import VirtualStream, VirtualStreamOp, own_stream
from equipoise.hal.stream import Stream


class EarlyRelease(VirtualStreamLock):
    """The empty word is set by the acquire, while the reader has not begun."""

    def _on_acquire(self) -> None:
        super()._on_acquire()
        super()._on_release()

    def _on_release(self) -> None:
        pass


class LostRelease(VirtualStreamLock):
    """A release that comes before the writer waits is lost."""

    def wait(self, epoch: int, timeout: float) -> None:
        if self._empty:
            self._empty, self._reading = False, True
        super().wait(epoch, timeout)


class ArmedByWait(VirtualStreamLock):
    """The next reader is admitted when the writer gets the slots back, not when it has written."""

    armed = owed = False

    def wait(self, epoch: int, timeout: float) -> None:
        super().wait(epoch, timeout)
        self.armed = True

    def signal(self, epoch: int) -> None:
        if not self.owed:
            super().signal(epoch)
        self.armed = self.owed = False

    def _passable(self) -> bool:
        return self.armed or super()._passable()

    def _on_acquire(self) -> None:
        if self.armed:
            self.armed, self.owed = False, True
        super()._on_acquire()


class Broadcast(VirtualStreamLock):
    """A signal releases every stream that has come to an acquire."""

    waiting: tuple[StreamTask, ...] = ()
    allowed = 0

    def signal(self, epoch: int) -> None:
        super().signal(epoch)
        self.allowed = sum(task.owner._queue._tasks[0] is task for task in self.waiting)

    def _launch(self, task: StreamTask) -> None:
        super()._launch(task)
        if task.gate == self._passable:
            self.waiting = (*self.waiting, task)

    def _passable(self) -> bool:
        return self.allowed > 0 or super()._passable()

    def _on_acquire(self) -> None:
        super()._on_acquire()
        self.waiting = tuple(t for t in self.waiting if t.owner._queue._tasks[0] is not t)
        self.allowed = max(self.allowed - 1, 0)


class TicketLock(VirtualStreamLock):
    """Acquire number n waits for n signals; a graph keeps the number."""

    tickets_issued = now_serving = 0

    def acquire(self, stream: Stream) -> None:
        self.tickets_issued += 1
        ticket = self.tickets_issued
        operation = VirtualStreamOp(lambda on: self._launch_ticket(on, ticket))
        own_stream(stream).issue(operation)

    def signal(self, epoch: int) -> None:
        self._check_epoch(epoch)
        self._full = True
        self.now_serving += 1

    def drain(self, timeout: float) -> int:
        epoch = super().drain(timeout)
        self.now_serving = self.tickets_issued
        return epoch

    def _launch_ticket(self, on: VirtualStream, ticket: int) -> None:
        condition = lambda: self.now_serving >= ticket or self._poisoned  # noqa: E731
        self._launch(
            StreamTask(on, self._pass(self._on_acquire), condition, self._skip, self._strike)
        )


class TimelessSignal(VirtualStreamLock):
    """A signal is taken from whatever epoch it comes."""

    def signal(self, epoch: int) -> None:
        super().signal(self.epoch)


class LeftoverWords(VirtualStreamLock):
    """The words go over from one epoch to the next."""

    def drain(self, timeout: float) -> int:
        words = self._full, self._empty
        epoch = super().drain(timeout)
        self._full, self._empty = words
        return epoch


class HastyDrain(VirtualStreamLock):
    """The next epoch begins while calls of this one are in flight."""

    def _drained(self) -> bool:
        return True


class UnwatchedLock(VirtualStreamLock):
    """The deadline is not watched."""

    def _strike(self) -> bool:
        return False


class SilentTimeout(VirtualStreamLock):
    """At the deadline the waiters continue, and no error is raised."""

    late = False

    def _strike(self) -> bool:
        self.late = True
        return True

    def _passable(self) -> bool:
        return self.late or super()._passable()


class PoisonOfThoseThere(VirtualStreamLock):
    """A poison releases streams that wait, but not those that come later."""

    def _launch_acquire(self, on: VirtualStream) -> None:
        condition = (lambda: self._full) if self._poisoned else self._passable
        self._launch(
            StreamTask(on, self._pass(self._on_acquire), condition, self._skip, self._strike)
        )


class LeftOutOfTheGraph(VirtualStreamLock):
    """An acquire that is captured is lost."""

    def acquire(self, stream: Stream) -> None:
        if own_stream(stream)._capture is None:
            super().acquire(stream)


class SpinningStream(VirtualStream):
    """What waits for a signal keeps the processors busy: no launch runs meanwhile."""

    def launch(self, program: Callable[[], object]) -> None:
        if self.capturing or self._queue.running is self:
            super().launch(program)
            return
        self.submit(StreamTask(self, in_turn((program,)), gate=self._processors_are_free))

    def _processors_are_free(self) -> bool:
        heads = [queue._tasks[0] for queue in self._device._queues if queue._tasks]
        return not any(head.strike != _no_deadline and not head.gate() for head in heads)


class OrderedCopies(VirtualSlotStore):
    """A copy from the host runs after everything launched on any stream."""

    def write(
        self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]], stream: Stream
    ) -> None:
        for other in self._device.streams:
            event = self._device.event()
            other.record(event)
            stream.wait(event)
        super().write(slots, sources, stream)


TURNS = "the-lock-alternates-writer-and-reader"
ONE = "one-signal-lets-one-waiter-go-on"
CAPTURED = "a-captured-lock-hands-over-at-every-replay"
MODEL = "lock-calls-match-the-lock-model"
DEADLINE = "an-unsignalled-lock-is-poisoned-at-its-deadline"
BESIDE = "other-streams-run-while-one-waits-for-a-signal"
MACHINE = "accelerator-state-machine-matches-its-model"
VAIN = "a-wait-raises-at-its-timeout"
MUTANTS = (
    Mutant(
        name="the-writer-is-let-in-by-the-acquire",
        clause="O5",
        broken="The writer writes while the reader that was let in still reads.",
        property=TURNS,
        subject=device_with(lock=EarlyRelease),
        # All of them have a writer that waits for a reader which has acquired and not released.
        also=(
            CAPTURED,
            MACHINE,
            VAIN,
        ),
    ),
    Mutant(
        name="a-release-before-the-wait-is-lost",
        clause="O5",
        broken="The writer wakes up only if it waits already when the stream releases.",
        property=TURNS,
        subject=device_with(lock=LostRelease),
        # Whatever hands the slots back needs the writer to wake up.
        also=(
            CAPTURED,
            MODEL,
            MACHINE,
            VAIN,
        ),
    ),
    Mutant(
        name="a-reader-is-let-in-before-the-writer-has-written",
        clause="L7",
        broken="The writer's wait lets the next reader in, onto a slot that is half written.",
        property=TURNS,
        subject=device_with(lock=ArmedByWait),
        # Whatever hands the slots back lets the next reader in.
        also=(
            CAPTURED,
            MODEL,
            MACHINE,
        ),
    ),
    Mutant(
        name="a-signal-is-a-broadcast",
        clause="L1",
        broken="A signal lets everybody go on who waits.",
        property=ONE,
        subject=device_with(lock=Broadcast),
    ),
    Mutant(
        name="a-ticket-is-baked-into-the-graph",
        clause="L2",
        broken="A captured acquire waits for the signal that was due when it was captured.",
        property=CAPTURED,
        subject=device_with(lock=TicketLock),
        # A number outlives the section that was abandoned with its epoch.
        also=(
            MODEL,
            MACHINE,
        ),
    ),
    Mutant(
        name="a-captured-acquire-is-lost",
        clause="O6",
        broken="The graph does not wait for signals from outside (PyTorch #146145).",
        property=CAPTURED,
        subject=device_with(lock=LeftOutOfTheGraph),
    ),
    Mutant(
        name="a-late-signal-counts",
        clause="L3",
        broken="A signal of an epoch that is over releases a waiter of the next.",
        property=MODEL,
        subject=device_with(lock=TimelessSignal),
        # Its rules drain locks and come late, too.
        also=(MACHINE,),
    ),
    Mutant(
        name="words-outlive-their-epoch",
        clause="L3",
        broken="A signal that nobody took lets the next epoch's first waiter go on.",
        property=MODEL,
        subject=device_with(lock=LeftoverWords),
        # Its rules drain locks, too.
        also=(MACHINE,),
    ),
    Mutant(
        name="an-epoch-ends-with-a-waiter-on-its-way",
        clause="L3",
        broken="Draining does not wait for what was launched.",
        property=MODEL,
        subject=device_with(lock=HastyDrain),
        # Their programs drain locks, too.
        also=(MACHINE, VAIN),
    ),
    Mutant(
        name="a-copy-from-the-host-waits-for-launches",
        clause="L5",
        broken="A copy from the host comes behind all launches: TensorRT-LLM's first engine hung.",
        property=TURNS,
        subject=device_with(slots=OrderedCopies),
    ),
    Mutant(
        name="a-waiting-stream-spins",
        clause="L4",
        broken="No launch runs anywhere while a stream waits for a signal.",
        property=BESIDE,
        subject=device_with(stream=SpinningStream),
        # There the writer writes by a launch while a replay waits.
        also=(CAPTURED,),
    ),
    Mutant(
        name="a-lost-signal-is-waited-for-in-silence",
        clause="C8",
        broken="No watchdog poisons the lock: one lost signal hangs for ever (NIXL #17665).",
        property=DEADLINE,
        subject=device_with(lock=UnwatchedLock),
    ),
    Mutant(
        name="a-time-out-is-not-told",
        clause="L6",
        broken="At the deadline the stream goes on, and its output counts.",
        property=DEADLINE,
        subject=device_with(lock=SilentTimeout),
    ),
    Mutant(
        name="a-poison-does-not-last",
        clause="L6",
        broken="Who comes to a poisoned lock waits.",
        property=MODEL,
        subject=device_with(lock=PoisonOfThoseThere),
    ),
)
