"""The protocol of request routing policies: events from a front end, assignments to workers."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Protocol, TypeAlias

RequestId: TypeAlias = Hashable
"""The caller's name of a request, unique among the requests that have not ended."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that arrived.

    Attributes:
        id: the caller's name of it.
        size: prompt tokens, at least 1.
        worker: the only worker that may serve it (an explicit data-parallel rank); None: any.
        hits: by worker, prompt tokens whose KV is cached there; None: none anywhere.
        expected: output tokens, if known; only an oracle knows them.
    """

    id: RequestId
    size: int
    worker: int | None = None
    hits: Sequence[int] | None = None
    expected: int | None = None


@dataclass(frozen=True)
class Assignment:
    """An instruction to send `request` to `worker` now."""

    request: RequestId
    worker: int


@unique
class WorkerState(Enum):
    """Whether a worker takes requests."""

    SERVING = "serving"
    DRAINING = "draining"
    """Finishes its requests and gets no more."""
    LOST = "lost"
    """Gone, with all its requests."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """A worker's report on itself, at one moment, over the requests of all front ends.

    Attributes:
        waiting: requests that it has not admitted.
        running: requests that it has admitted.
        tokens: tokens of its requests: in its KV cache, and of waiting prompts.
        kv_usage: used fraction of its KV cache, 0 to 1.
    """

    waiting: int
    running: int
    tokens: int
    kv_usage: float


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The capacity of a worker; None means unlimited.

    Attributes:
        slots: maximum number of running requests.
        kv_tokens: size of its KV cache in tokens.
    """

    slots: int | None = None
    kv_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerChange:
    """A change of worker `worker`: the fields that are not None.

    A number equal to the number of workers so far adds a worker. A number with a `name` is from now
    on that of the worker of this name, and with an empty one of none; one that had the number
    before is gone.
    """

    worker: int
    name: str | None = None
    state: WorkerState | None = None
    capacity: Capacity | None = None
    report: WorkerReport | None = None


@dataclass(frozen=True)
class Decision:
    """The consequences of an event.

    Attributes:
        assignments: to be sent now, in this order.
        lost: requests that had begun on a lost worker. The policy no longer knows them; the caller
            has to fail them.
        due: requests wait for the rest of a step to be told. If nothing of it comes in time, call
            `decide`.
    """

    assignments: tuple[Assignment, ...] = ()
    lost: tuple[RequestId, ...] = ()
    due: bool = False


STEP_TIMEOUT_SECONDS = 0.2
"""How long a caller waits for the rest of a step while a decision is due: longer than the tokens of
a step take to come, and short for a client."""


class RoutingPolicy(Protocol):
    """Decides which worker serves a request, and when; not thread-safe.

    Each method returns the decisions that follow from the event. A request without an assignment
    waits in the policy and is assigned after a later event.

    The tokens of an engine's step may be told in one event or in several. A policy may put its
    decision off until it has heard of all requests that run, and says so (`Decision.due`).

    One that has a method `close` is told by it that it is called no more.

    Raises RequestError for a request that arrives twice, is unknown, or whose state does not allow
    the event; WorkerError for a worker that does not exist.
    """

    def on_arrival(self, request: Request) -> Decision:
        """Handles the arrival of a request."""
        ...

    def on_tokens(
        self, counts: Mapping[RequestId, int], finished: Iterable[RequestId] = ()
    ) -> Decision:
        """Handles a step: the number of new tokens by request, and the requests that ended."""
        ...

    def on_finish(self, request: RequestId) -> Decision:
        """Handles the end of a request."""
        ...

    def on_abort(self, request: RequestId) -> Decision:
        """Handles the abort of a request, waiting or running."""
        ...

    def on_worker_change(self, change: WorkerChange) -> Decision:
        """Handles a change of a worker: its state, its capacity or its report."""
        ...

    def on_running(self, request: Request, worker: int, tokens: int) -> Decision:
        """Handles a request that `worker` has already, with so many tokens: this policy takes the
        place of another one. A policy that never does need not have it."""
        ...

    def decide(self) -> Decision:
        """Decides now, though a step may be told in part. A policy of which no decision is ever
        due need not have it."""
        ...
