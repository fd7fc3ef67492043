"""What a front end tells a policy, and what it is told: which request goes to which worker."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Protocol, TypeAlias

RequestId: TypeAlias = Hashable
"""Whatever the caller calls a request; unique among those that are not gone."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that arrived.

    Attributes:
        id: the caller's name for it.
        size: prompt tokens, at least 1.
        worker: the only worker that may serve it; None: any. An explicit data-parallel rank.
        hits: by worker, tokens of the prompt whose KV is cached there; None: none anywhere.
        expected: output tokens, where somebody knows them; only an oracle does.
    """

    id: RequestId
    size: int
    worker: int | None = None
    hits: Sequence[int] | None = None
    expected: int | None = None


@dataclass(frozen=True)
class Assignment:
    """`request` is to be sent to `worker` now."""

    request: RequestId
    worker: int


@unique
class WorkerState(Enum):
    """Whether a worker takes requests."""

    SERVING = "serving"
    DRAINING = "draining"
    """Keeps what it has, and gets nothing more."""
    LOST = "lost"
    """Has nothing any more."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What a worker says of itself, of all front ends' requests together, at one moment.

    Attributes:
        waiting: requests that it has not admitted.
        running: requests that it has.
        tokens: of its requests: in its KV cache, and prompts that wait.
        kv_usage: the part of its KV cache that is taken, 0 to 1.
    """

    waiting: int
    running: int
    tokens: int
    kv_usage: float


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """How much a worker takes; None: more than anybody will ask for.

    Attributes:
        slots: requests at once.
        kv_tokens: tokens in its KV cache.
    """

    slots: int | None = None
    kv_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerChange:
    """Something changed about worker `worker`: what is not None here.

    A worker whose number is the number of workers so far is a new one.
    """

    worker: int
    state: WorkerState | None = None
    capacity: Capacity | None = None
    report: WorkerReport | None = None


@dataclass(frozen=True)
class Decision:
    """What follows from an event.

    Attributes:
        assignments: send these now, in this order.
        lost: requests that had begun on a worker that is lost; they are forgotten, and it is for
            the caller to fail them.
    """

    assignments: tuple[Assignment, ...] = ()
    lost: tuple[RequestId, ...] = ()


class RoutingPolicy(Protocol):
    """Decides which worker serves a request, and when; not to be called by two threads at once.

    Every method returns what follows at once. A request that is in no assignment waits in the
    policy, and is in one of a later event.

    Raises: RequestError for a request that is known already, unknown, or in a state in which that
    cannot happen; WorkerError for a worker that does not exist.
    """

    def on_arrival(self, request: Request) -> Decision:
        """A request arrived."""
        ...

    def on_tokens(
        self, counts: Mapping[RequestId, int], finished: Iterable[RequestId] = ()
    ) -> Decision:
        """Requests made so many tokens each, and some of them ended: what one step brings."""
        ...

    def on_finish(self, request: RequestId) -> Decision:
        """A request ended."""
        ...

    def on_abort(self, request: RequestId) -> Decision:
        """A request was given up, wherever it is."""
        ...

    def on_worker_change(self, change: WorkerChange) -> Decision:
        """A worker began or ceased to serve, or reported."""
        ...
