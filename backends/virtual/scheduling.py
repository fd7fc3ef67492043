"""The queues of streams, which run one micro-step at a time, and the choice of which one moves
next.

The choice comes from outside as bytes, so that a test can draw and repeat every interleaving.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.backends.virtual.stream import VirtualStream


def always() -> bool:
    """Nothing has to happen first."""
    return True


def _ignore(_: BaseException) -> None:
    """Nobody waits for the task to pass."""


def _no_deadline() -> bool:
    """Time changes nothing for the task."""
    return False


class StreamTask:
    """Something launched on a stream.

    Args:
        owner: the stream it was launched on.
        steps: does one micro-step each time it is advanced; the last one ends it.
        gate: whether the first step may happen; has no side effect.
        skip: called with the stream's failure, or its end, if the task will never run.
        strike: called when time passes while the task waits at the head of its queue; says whether
            that changed anything.
    """

    __slots__ = ("gate", "owner", "skip", "steps", "strike")

    def __init__(
        self,
        owner: "VirtualStream",
        steps: Iterator[None],
        gate: Callable[[], bool] = always,
        skip: Callable[[BaseException], None] = _ignore,
        strike: Callable[[], bool] = _no_deadline,
    ) -> None:
        self.owner = owner
        self.steps = steps
        self.gate = gate
        self.skip = skip
        self.strike = strike

    def move(self) -> bool:
        """One micro-step; whether it was the last. Raises what the program raises."""
        for _ in self.steps:
            return False
        return True


def in_turn(steps: Iterable[Callable[[], object]]) -> Iterator[None]:
    """One micro-step each."""
    first = True
    for step in steps:
        if not first:
            yield
        first = False
        step()


class TaskQueue:
    """What one or, on a pool that aliases, several streams have launched.

    Args:
        rank: whose device it belongs to.
    """

    __slots__ = ("_tasks", "ranks", "running")

    def __init__(self, rank: int) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.running: VirtualStream | None = None
        self._tasks: deque[StreamTask] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def push(self, task: StreamTask) -> None:
        """Behind everything."""
        self._tasks.append(task)

    def expire(self) -> bool:
        """Time passes; whether that changes anything for the task that waits."""
        waits = bool(self._tasks) and not self.ready()
        return waits and self._tasks[0].strike()

    def ready(self) -> bool:
        """Whether a micro-step can happen."""
        return bool(self._tasks) and self.running is None and self._tasks[0].gate()

    def step(self) -> None:
        """Let the task at the head do its next micro-step."""
        task = self._tasks[0]
        self.running = task.owner
        try:
            has_ended = task.owner.run(task)
        finally:
            self.running = None
        # A step that failed its stream has emptied the queue of it already.
        if has_ended and self._tasks and self._tasks[0] is task:
            self._tasks.popleft()
            task.owner.passed += 1

    def purge(self, owner: "VirtualStream", failure: BaseException) -> None:
        """Skip everything that `owner` has launched."""
        own_tasks = [task for task in self._tasks if task.owner is owner]
        self._tasks = deque(task for task in self._tasks if task.owner is not owner)
        owner.passed += len(own_tasks)
        for task in own_tasks:
            task.skip(failure)


class HostNotifications:
    """News on its way from a device to its host, delivered one micro-step each."""

    __slots__ = ("_pending", "ranks")

    def __init__(self, rank: int) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self._pending: deque[Callable[[], None]] = deque()

    def post(self, notification: Callable[[], None]) -> None:
        """Something happened on the device."""
        self._pending.append(notification)

    def ready(self) -> bool:
        """Whether there is a notification."""
        return bool(self._pending)

    def step(self) -> None:
        """Deliver the oldest."""
        self._pending.popleft()()

    def flush(self) -> None:
        """Deliver all of it: the host has synchronised."""
        while self._pending:
            self.step()


class Schedule:
    """Choices taken from bytes, one each; when they are used up, always the first."""

    __slots__ = ("_choices", "_position")

    def __init__(self, choices: bytes) -> None:
        self._choices = choices
        self._position = 0

    def choose(self, count: int) -> int:
        """In [0, count). A choice among one costs no byte, so that none is wasted."""
        if count < 2 or self._position >= len(self._choices):
            return 0
        self._position += 1
        return self._choices[self._position - 1] % count
