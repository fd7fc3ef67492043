"""Streams of the virtual device, whose micro-steps are chosen from outside, and graphs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from equipoise.backends.virtual.event import VirtualEvent, own_event
from equipoise.backends.virtual.scheduling import StreamTask, TaskQueue, in_turn
from equipoise.hal.errors import StreamFailed, StreamTimeout, Unsupported
from equipoise.hal.stream import Event, Role, Stream

if TYPE_CHECKING:
    from equipoise.backends.virtual.device import VirtualDevice

Steps = Callable[[], Iterator[None]]
"""Begins a run of several micro-steps; each `yield` is a place where others may come between."""


@dataclass(frozen=True)
class VirtualStreamOp:
    """Something issued to a stream, in a form in which a graph can issue it again.

    Attributes:
        issue: enqueues it on the stream it is given.
        guard: entered around the issuing, before any operation that is issued with it; raises what
            forbids the operation.
    """

    issue: Callable[["VirtualStream"], None]
    guard: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass
class _Capture:
    ops: list[VirtualStreamOp] = field(default_factory=list)
    recorded: set[VirtualEvent] = field(default_factory=set)


class _Barrier:
    """What holds a stream up until it is lifted."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open = False

    def lift(self) -> None:
        self._open = True

    def lifted(self) -> bool:
        return self._open


class VirtualStream:
    """A role's view of a queue.

    An exception in a program fails the stream for good: what it has launched is skipped, its
    recordings fail with the same cause, and `launch` and `synchronize` raise it (clause E7).
    """

    def __init__(self, role: Role, device: "VirtualDevice", queue: TaskQueue) -> None:
        self._role = role
        self._device = device
        self._queue = queue
        self._name = f"{device.name}.{role}"
        self._failure: BaseException | None = None
        self._capture: _Capture | None = None
        self._barrier = _Barrier()
        self._launched = 0
        self.passed = 0

    @property
    def role(self) -> Role:
        """What the stream is for."""
        return self._role

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current stream of the calling host (clause X6)."""
        host = self._device.world.host
        before = self._device.current.get(host)
        self._device.current[host] = self
        try:
            yield
        finally:
            self._device.current[host] = before

    def launch(self, program: Callable[[], object]) -> None:
        """Enqueue `program` as one micro-step, or run it at once inside one of this stream's."""
        self.perform(lambda: in_turn((program,)))

    def record(self, event: Event) -> None:
        """Enqueue the point that `event` now stands for."""
        own = own_event(event)
        if self._capture is not None:
            self._capture.recorded.add(own)
            self._capture.ops.append(VirtualStreamOp(lambda on: on.record(own)))
            return
        recording = own.start_recording()
        try:
            self.submit(StreamTask(self, in_turn((recording.reach,)), skip=recording.fail))
        except StreamFailed as refusal:
            # Whoever waits for the event must not wait for a point that can never come.
            recording.fail(refusal.__cause__ or refusal)
            raise

    def wait(self, event: Event) -> None:
        """Let nothing launched from now on move before the latest recording of `event`."""
        own = own_event(event)
        if self._capture is not None:
            if own not in self._capture.recorded:
                own.latest()  # raises now what would come too late at the replay (clause O3)
            self._capture.ops.append(VirtualStreamOp(lambda on: on.wait(own)))
            return
        self._follow_event(own)

    def synchronize(self, timeout: float) -> None:
        """Advance the world until everything launched so far has run."""
        if self._capture is not None:
            raise Unsupported(f"stream {self._name} cannot be synchronised while it is captured")
        target = self._launched
        drained = self._device.world.until(lambda: self.passed >= target, timeout)
        self.check()
        if not drained:
            raise StreamTimeout(f"stream {self._name} did not drain within {timeout:g} s")
        self._device.reports.flush()

    def perform(self, steps: Steps) -> None:
        """Enqueue a task of several micro-steps, or keep it while this stream is captured."""
        if self._capture is not None:
            self._capture.ops.append(VirtualStreamOp(lambda on: on.perform(steps)))
            return
        self.submit(StreamTask(self, steps()))

    def issue(self, *ops: VirtualStreamOp) -> None:
        """Issue operations back to back, or keep them while this stream is captured."""
        if self._capture is not None:
            self._capture.ops.extend(ops)
            return
        with ExitStack() as guards:
            for op in ops:
                guards.enter_context(op.guard())
            for op in ops:
                op.issue(self)

    def submit(self, task: StreamTask) -> None:
        """Put a task at the end; from inside a program of this stream it runs at once."""
        if self._queue.running is self:
            self._run_in_place(task)
            return
        self.check()
        self._launched += 1
        self._queue.push(task)
        self._device.world.submitted()

    def follow(self, passable: Callable[[], bool], take: Callable[[], None]) -> None:
        """Let nothing launched from now on move before `passable`; `take` is a micro-step."""
        self.submit(StreamTask(self, in_turn((take,)), gate=passable))

    @property
    def capturing(self) -> bool:
        """Whether what is issued is kept for a graph."""
        return self._capture is not None

    def capture(self, program: Callable[[], object]) -> tuple[VirtualStreamOp, ...]:
        """What `program` issues here; none of it is run."""
        if self._capture is not None:
            raise Unsupported(f"stream {self._name} is being captured already")
        capture = self._capture = _Capture()
        try:
            program()
        finally:
            self._capture = None
        return tuple(capture.ops)

    def run(self, task: StreamTask) -> bool:
        """One micro-step with this stream current; whether the task has ended."""
        before, self._device.running = self._device.running, self
        try:
            return task.move()
        except Exception as failure:
            self.fail(failure)
            return True
        finally:
            self._device.running = before

    def fail(self, failure: BaseException) -> None:
        """Take no more, and skip what was launched."""
        self._failure = self._failure or failure
        self._queue.purge(self, self._failure)

    def check(self) -> None:
        """Raise `StreamFailed` if it takes no more."""
        if self._failure is not None:
            raise StreamFailed(f"stream {self._name} failed: {self._failure}") from self._failure

    def hold(self) -> None:
        """Nothing launched from now on moves, until `let_go`."""
        self._barrier = _Barrier()
        self.submit(StreamTask(self, in_turn((self._barrier.lift,)), gate=self._barrier.lifted))

    def let_go(self) -> None:
        """End of `hold`."""
        self._barrier.lift()

    def _follow_event(self, event: VirtualEvent) -> None:
        """Wait for the recording that is current now (clauses O2, O4)."""
        awaited = event.latest().await_by()
        self.follow(awaited.passable, awaited.take)

    def _run_in_place(self, task: StreamTask) -> None:
        world = self._device.world
        if not world.until(task.gate, float("inf")):
            raise StreamTimeout(f"a program on {self._name} waits for what can never come")
        while not task.move():
            pass


def own_stream(stream: Stream) -> VirtualStream:
    """`stream` itself. Raises `TypeError` for one of another backend."""
    if not isinstance(stream, VirtualStream):
        raise TypeError(f"a stream of another backend: {stream!r}")
    return stream


if TYPE_CHECKING:
    from equipoise.backends.virtual.device import VirtualDevice


class VirtualGraph:
    """What was captured; empty at first, and after a capture that raised as it was before.

    A replay issues the operations anew: events are recorded again, lock words and slots are
    taken in turn again, leases are looked at again (clauses B7, O6).
    """

    def __init__(self, device: "VirtualDevice") -> None:
        self._device = device
        self._ops: tuple[VirtualStreamOp, ...] = ()

    def capture(self, stream: Stream, program: Callable[[], object]) -> None:
        """Keep what `program` launches on `stream`, without running it."""
        self._ops = own_stream(stream).capture(program)

    def replay(self, stream: Stream) -> None:
        """Launch what was kept."""
        own_stream(stream).issue(*self._ops)
