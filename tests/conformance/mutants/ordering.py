"""Mutants of family *ordering*."""

from collections.abc import Callable

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import device_with

from equipoise.backends.virtual.accelerator import VirtualAccelerator
from equipoise.backends.virtual.event import VirtualEvent, VirtualRecording, own_event
from equipoise.backends.virtual.scheduling import StreamTask, in_turn
from equipoise.backends.virtual.stream import VirtualStream
from equipoise.hal.errors import StreamFailed
from equipoise.hal.stream import Event


class OvertakingStream(VirtualStream):
    """A launch goes ahead of the launch before it, if that one still waits."""

    launching = False
    latest: StreamTask | None = None

    def launch(self, program: Callable[[], object]) -> None:
        self.launching = True
        try:
            super().launch(program)
        finally:
            self.launching = False

    def submit(self, task: StreamTask) -> None:
        super().submit(task)
        tasks = self._queue._tasks
        if self.launching and len(tasks) > 1 and tasks[-2] is self.latest:
            tasks[-2], tasks[-1] = tasks[-1], tasks[-2]
        self.latest = task if self.launching else None


class UnheardMark(VirtualRecording):
    """Streams that wait for it continue at once."""

    __slots__ = ()

    def await_by(self) -> VirtualRecording:
        recording = VirtualRecording(self._device)
        recording.reach()
        return recording


class UnheardEvent(VirtualEvent):
    """Only the host waits for it."""

    def start_recording(self) -> VirtualRecording:
        self._recording = UnheardMark(self._device)
        return self._recording


class UnheardWaits(VirtualAccelerator):
    """What callers record is not waited for by streams; a store's own events are."""

    def event(self) -> VirtualEvent:
        return UnheardEvent(self._device)


class SignedMark(VirtualRecording):
    """Knows the stream that recorded it."""

    __slots__ = ("by",)

    by: VirtualStream


class ThoroughStream(VirtualStream):
    """Waits for all that was launched, up to the wait, on the stream that recorded the event."""

    def record(self, event: Event) -> None:
        super().record(event)
        mark = own_event(event)._recording
        if isinstance(mark, SignedMark):
            mark.by = self

    def _follow_event(self, event: VirtualEvent) -> None:
        mark = event.latest()
        if isinstance(mark, SignedMark) and mark.by is not self:
            event = self._device.event()
            mark.by.record(event)
        super()._follow_event(event)


class IgnorantStream(VirtualStream):
    """Goes on where it should wait for an event that nothing was recorded into."""

    def wait(self, event: Event) -> None:
        if own_event(event)._recording is not None:
            super().wait(event)


class HopefulEvent(VirtualEvent):
    """Says before the first recording that it was reached."""

    def query(self) -> bool:
        return self._recording is None or super().query()


class LatestStream(VirtualStream):
    """Goes on when the event's latest recording is reached, whichever that is by then."""

    def _follow_event(self, event: VirtualEvent) -> None:
        own = event.latest()
        condition = lambda: own.ended or event.latest().ended  # noqa: E731
        self.submit(StreamTask(self, in_turn((own.take,)), gate=condition))


class StrandedStream(VirtualStream):
    """Waits on when the event is recorded again, until that point is reached as well."""

    def _follow_event(self, event: VirtualEvent) -> None:
        own = event.latest()
        condition = lambda: own.ended and event.latest().ended  # noqa: E731
        self.submit(StreamTask(self, in_turn((own.take,)), gate=condition))


class DeafStream(VirtualStream):
    """Exceptions of its programs die where they are raised."""

    def fail(self, failure: BaseException) -> None:
        if isinstance(failure, StreamFailed):
            super().fail(failure)


class ForgetfulStream(VirtualStream):
    """Tells of its failure once."""

    def check(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise StreamFailed(f"failed: {failure}") from failure


class StubbornStream(VirtualStream):
    """Runs what was launched after the program that raised."""

    def fail(self, failure: BaseException) -> None:
        if isinstance(failure, StreamFailed):
            super().fail(failure)
        self._failure = self._failure or failure


IN_ORDER = "launches-run-in-the-order-that-streams-and-events-give"
HELD_LAUNCH = "a-held-launch-holds-up-only-what-is-ordered-behind-it"
UNRECORDED = "an-unrecorded-event-cannot-be-waited-for"
FAILED_STREAM = "a-failed-stream-raises-at-every-call"
GRAPHS = "a-graph-runs-at-its-replays-only"
KERNELS = "kernels-follow-their-stream"
COMMIT_VISIBILITY = "a-commit-is-visible-after-its-event"
TABLES = "a-commit-of-tables-writes-the-word-last"
ROUTED = "a-routing-pass-reads-one-generation"
RULED = "a-pass-by-a-rule-reads-one-generation"
TOGETHER = "tables-and-weights-of-a-layer-change-together"
WAITS = "a-stream-that-waits-for-a-failed-work-fails"
MUTANTS = (
    Mutant(
        name="a-launch-overtakes",
        clause="O1",
        broken="A launch goes ahead of the launch before it, if that one still waits.",
        property=IN_ORDER,
        subject=device_with(stream=OvertakingStream),
        # All of these launch on one stream, twice in a row, what must run in that order.
        also=(
            HELD_LAUNCH,
            FAILED_STREAM,
            GRAPHS,
            KERNELS,
        ),
    ),
    Mutant(
        name="a-wait-is-not-heard",
        clause="O2",
        broken="A stream that waits for an event goes on at once.",
        property=HELD_LAUNCH,
        subject=device_with(accelerator=UnheardWaits),
        # All of these order streams by events, or have a failure passed on by them.
        also=(
            IN_ORDER,
            FAILED_STREAM,
            COMMIT_VISIBILITY,
            TABLES,
            ROUTED,
            RULED,
            TOGETHER,
            "accelerator-state-machine-matches-its-model",
        ),
    ),
    Mutant(
        name="a-wait-is-for-the-whole-stream",
        clause="O2",
        broken="A wait also waits for what was launched behind the recording.",
        property=HELD_LAUNCH,
        subject=device_with(stream=ThoroughStream, mark=SignedMark),
        # It launches on after it has recorded.
        also=("hundreds-of-launches-and-events-are-kept-apart",),
    ),
    Mutant(
        name="an-unrecorded-event-is-passed",
        clause="O3",
        broken="A wait for an event that nothing was recorded into does nothing, as in CUDA.",
        property=UNRECORDED,
        subject=device_with(stream=IgnorantStream),
    ),
    Mutant(
        name="an-unrecorded-event-was-reached",
        clause="O3",
        broken="A query before the first recording says yes, as torch_npu's does.",
        property=UNRECORDED,
        subject=device_with(event=HopefulEvent),
    ),
    Mutant(
        name="recording-again-releases-earlier-waiters",
        clause="O4",
        broken="A waiter goes on when a later recording of its event is reached.",
        property=HELD_LAUNCH,
        subject=device_with(stream=LatestStream),
        # The same programs without a hold.
        # The machine orders streams by events.
        also=(
            IN_ORDER,
            "accelerator-state-machine-matches-its-model",
        ),
    ),
    Mutant(
        name="recording-again-strands-earlier-waiters",
        clause="O4",
        broken="A waiter waits for later recordings too, as with an external event that is reset.",
        property=HELD_LAUNCH,
        subject=device_with(stream=StrandedStream),
        # The same programs without a hold.
        # The machine orders streams by events.
        also=(
            IN_ORDER,
            "accelerator-state-machine-matches-its-model",
        ),
    ),
    Mutant(
        name="an-exception-dies-on-its-stream",
        clause="E7",
        broken="Nobody hears that a program raised.",
        property=FAILED_STREAM,
        subject=device_with(stream=DeafStream),
        # What a stream waits for fails it in the same way as what it runs.
        also=(WAITS,),
    ),
    Mutant(
        name="a-failure-is-told-once",
        clause="E7",
        broken="The first call that raises clears the failure.",
        property=FAILED_STREAM,
        subject=device_with(stream=ForgetfulStream),
        # Both make several calls on a stream that has failed, or whose device was closed.
        also=(WAITS, "a-closed-device-refuses-launches"),
    ),
    Mutant(
        name="a-failed-stream-runs-on",
        clause="E7",
        broken="What was launched behind the program that raised runs.",
        property=FAILED_STREAM,
        subject=device_with(stream=StubbornStream),
    ),
)
