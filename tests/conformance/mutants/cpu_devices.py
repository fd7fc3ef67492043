"""Mutants of the CPU: events, failed streams, replays, slot operations, and closed devices."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import cpu_with

from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.backends.cpu.host_slots import Buffer
from equipoise.backends.cpu.slots import CpuSlotStore
from equipoise.backends.cpu.stream import (
    CpuEvent,
    CpuGraph,
    CpuRecording,
    CpuStream,
    _StreamTask,
    own_event,
    own_stream,
)
from equipoise.hal.accelerator import Memory, Topology
from equipoise.hal.errors import StreamFailed
from equipoise.hal.stream import Event, Stream


class ReachedWhenRecorded(CpuEvent):
    """An event says that it was reached as soon as it is recorded."""

    def query(self) -> bool:
        return self._recording is not None


class QueryNeedsWait(CpuEvent):
    """A query is true only after a wait."""

    waited: CpuRecording | None = None

    def query(self) -> bool:
        return super().query() and self.waited is self._recording

    def synchronize(self, timeout: float) -> None:
        super().synchronize(timeout)
        self.waited = self._recording


class SecondRecordingNotAwaited(CpuEvent):
    """Waiting for an event that was recorded again returns at once."""

    recordings = 0

    def start_recording(self) -> CpuRecording:
        self.recordings += 1
        return super().start_recording()

    def synchronize(self, timeout: float) -> None:
        if self.recordings < 2:
            super().synchronize(timeout)


class AnswersForFirstRecording(CpuEvent):
    """A query answers for the first recording."""

    first: CpuRecording | None = None

    def start_recording(self) -> CpuRecording:
        recording = super().start_recording()
        self.first = self.first or recording
        return recording

    def query(self) -> bool:
        return self.first is not None and self.first.latch.is_set()


class RunsAfterFailure(CpuStream):
    """What is queued after a program that raised runs all the same."""

    def _run(self, task: _StreamTask) -> None:
        try:
            task.run()
        except BaseException as failure:
            self._failure = self._failure or failure
            task.skip(self._failure)


class ReportsLastFailure(CpuStream):
    """A failed stream takes one more launch, and blames that one's failure."""

    def _run(self, task: _StreamTask) -> None:
        before, self._failure = self._failure, None
        super()._run(task)
        self._failure = self._failure or before


class IgnoresFailedRecording(CpuStream):
    """A stream continues when a recording that it waits for has failed."""

    def wait(self, event: Event) -> None:
        mark = own_event(event).latest()

        def program() -> None:
            with suppress(StreamFailed):
                mark.wait(60.0, "an event")

        self.launch(program)


class ReplaysOnCaptureStream(CpuGraph):
    """A replay goes to the stream that was captured."""

    at: Stream | None = None

    def capture(self, stream: Stream, program: Callable[[], object]) -> None:
        super().capture(stream, program)
        self.at = stream

    def replay(self, stream: Stream) -> None:
        super().replay(self.at or stream)


class ReplaysOnOwnStream(CpuGraph):
    """A replay runs before earlier launches of its stream: it has a stream of its own."""

    def replay(self, stream: Stream) -> None:
        own = own_stream(stream)
        aside = CpuStream(own.role, "aside")
        super().replay(aside)
        aside.close(60.0)


class DropsLaunchAfterClose(CpuStream):
    """A closed stream drops launches silently."""

    def launch(self, program: Callable[[], object]) -> None:
        if not self._closed:
            super().launch(program)


class CloseLeavesThreads(CpuAccelerator):
    """Closing leaves every worker where it is."""

    def close(self) -> None:
        for stream in self._streams.values():
            stream._closed = True


class SecondCloseRaises(CpuAccelerator):
    """Closing again is an error."""

    open = True

    def close(self) -> None:
        if not self.open:
            raise StreamFailed("the device was closed before")
        self.open = False
        super().close()


class UnorderedOps(CpuSlotStore):
    """Operations are launched and not ordered: each stream by itself."""

    def _issue(
        self,
        program: Callable[[], object],
        stream: Stream,
        *,
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
    ) -> None:
        stream.launch(program)

    def _issue_write(
        self,
        program: Callable[[], object],
        stream: Stream,
        slots: tuple[int, ...],
        reads: Iterable[Buffer] = (),
    ) -> None:
        with self._leases.exclude_leased(slots):
            stream.launch(program)


class FreeAboveTotal(CpuAccelerator):
    """Free memory is total memory and what is used."""

    def memory(self) -> Memory:
        plausible = super().memory()
        return Memory(plausible.total, 2 * plausible.total - plausible.free)


class NoMemory(CpuAccelerator):
    """There is no memory."""

    def memory(self) -> Memory:
        return Memory(0, 0)


class NoNodeName(CpuAccelerator):
    """The node has no name, and its NUMA node is -2."""

    def topology(self) -> Topology:
        return Topology(0, "", -2)


class ChangingIndex(CpuAccelerator):
    """Each time the device is another one."""

    numbers = count()

    def topology(self) -> Topology:
        return Topology(next(self.numbers), "node", -1)


POINTS = "an-event-says-when-its-point-is-reached"
FAILED_STREAM = "a-failed-stream-raises-at-every-call"
ELSEWHERE = "a-graph-replays-on-the-stream-it-is-given"
CLOSED_DEVICE = "a-closed-device-refuses-launches"
MEMORY_AND_TOPOLOGY = "memory-and-topology-are-plausible"
MUTANTS = (
    Mutant(
        name="a-query-runs-ahead",
        clause="O7",
        broken="An event says that it was reached as soon as it is recorded.",
        property=POINTS,
        subject=cpu_with(event=ReachedWhenRecorded),
        real=True,
    ),
    Mutant(
        name="a-query-is-never-true-by-itself",
        clause="O7",
        broken="An event is reached only for those who have waited for it.",
        property=POINTS,
        subject=cpu_with(event=QueryNeedsWait),
        real=True,
    ),
    Mutant(
        name="an-event-that-is-recorded-again-is-not-waited-for",
        clause="O7",
        broken="The host's wait for an event that was recorded before returns at once.",
        property=POINTS,
        subject=cpu_with(event=SecondRecordingNotAwaited),
        real=True,
    ),
    Mutant(
        name="a-query-answers-for-the-first-recording",
        clause="O7",
        broken="An event that is recorded again says that it was reached before it is.",
        property=POINTS,
        subject=cpu_with(event=AnswersForFirstRecording),
        real=True,
    ),
    Mutant(
        name="what-is-queued-behind-a-failure-runs",
        clause="E7",
        broken="Programs that were launched behind one that raised run all the same.",
        property=FAILED_STREAM,
        subject=cpu_with(stream=RunsAfterFailure),
        real=True,
    ),
    Mutant(
        name="a-failure-hides-the-one-before",
        clause="E7",
        broken="A stream blames what has failed last.",
        property=FAILED_STREAM,
        subject=cpu_with(stream=ReportsLastFailure),
        real=True,
    ),
    Mutant(
        name="a-failed-recording-is-passed",
        clause="E7",
        broken="A stream goes on behind an event that can never be reached.",
        property=FAILED_STREAM,
        subject=cpu_with(stream=IgnoresFailedRecording),
        real=True,
    ),
    Mutant(
        name="a-graph-replays-where-it-was-captured",
        clause="B7",
        broken="A replay goes to the stream that was captured, whatever stream it is given.",
        property=ELSEWHERE,
        subject=cpu_with(graph=ReplaysOnCaptureStream),
        real=True,
    ),
    Mutant(
        name="a-graph-replays-on-a-stream-of-its-own",
        clause="B7",
        broken="A replay does not wait for what its stream was given before.",
        property=ELSEWHERE,
        subject=cpu_with(graph=ReplaysOnOwnStream),
        real=True,
    ),
    Mutant(
        name="a-closed-stream-forgets-what-it-is-given",
        clause="E5",
        broken="A launch on a closed device is neither run nor refused.",
        property=CLOSED_DEVICE,
        subject=cpu_with(stream=DropsLaunchAfterClose),
        real=True,
    ),
    Mutant(
        name="closing-leaves-threads",
        clause="E5",
        broken="The threads of a device outlive its close.",
        property=CLOSED_DEVICE,
        subject=cpu_with(accelerator=CloseLeavesThreads),
        real=True,
    ),
    Mutant(
        name="closing-again-is-an-error",
        clause="E5",
        broken="A device that is closed twice raises.",
        property=CLOSED_DEVICE,
        subject=cpu_with(accelerator=SecondCloseRaises),
        real=True,
    ),
    Mutant(
        name="verbs-on-two-streams-are-not-ordered",
        clause="V5",
        broken="A store leaves it to its caller to order operations of several streams.",
        property="operations-of-a-store-take-effect-in-the-order-of-issue",
        subject=cpu_with(slots=UnorderedOps),
        real=True,
    ),
    Mutant(
        name="more-memory-is-free-than-there-is",
        clause="B10",
        broken="Free memory exceeds the total.",
        property=MEMORY_AND_TOPOLOGY,
        subject=cpu_with(accelerator=FreeAboveTotal),
        real=True,
    ),
    Mutant(
        name="there-is-no-memory",
        clause="B10",
        broken="A device says that it has no memory.",
        property=MEMORY_AND_TOPOLOGY,
        subject=cpu_with(accelerator=NoMemory),
        real=True,
    ),
    Mutant(
        name="the-node-has-no-name",
        clause="B10",
        broken="The node of a device has no name, and its NUMA node is below -1.",
        property=MEMORY_AND_TOPOLOGY,
        subject=cpu_with(accelerator=NoNodeName),
        real=True,
    ),
    Mutant(
        name="a-device-is-another-at-each-call",
        clause="B10",
        broken="The index of a device grows with each question.",
        property=MEMORY_AND_TOPOLOGY,
        subject=cpu_with(accelerator=ChangingIndex),
        real=True,
    ),
)
