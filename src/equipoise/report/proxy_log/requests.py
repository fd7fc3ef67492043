"""Requests of one run of a proxy, as tables and plots take them."""

import re
from dataclasses import dataclass
from functools import cached_property

COMPLETED = "completed"


@dataclass(frozen=True, kw_only=True)
class LoggedRequest:
    """One request; times in seconds of one clock, None: it did not come to that.

    Attributes:
        worker: name of the one that had it last.
        arrived_at: at the proxy.
        bound_at: to that worker.
        first_answer_at: of its answer was passed on.
        ended_at: of it.
        prompt: tokens.
        output: tokens.
        streamed: whether tokens were passed on as they came.
        outcome: a word of the log.
        attempts: times that it was sent to a worker.
    """

    worker: str | None
    arrived_at: float
    bound_at: float | None
    first_answer_at: float | None
    ended_at: float
    prompt: int
    output: int
    streamed: bool
    outcome: str
    attempts: int

    @property
    def first_token_at(self) -> float | None:
        """When the policy began to learn of its tokens one by one; None unless streamed."""
        return self.first_answer_at if self.streamed else None

    @property
    def wait(self) -> float | None:
        """Seconds until a worker had it; None if it was sent again: the log has the last one."""
        return None if self.attempts > 1 else self.delay

    @property
    def delay(self) -> float | None:
        """Seconds until the last worker had it, those at earlier ones included."""
        return None if self.bound_at is None else max(0.0, self.bound_at - self.arrived_at)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, as its client saw them; of a stream only."""
        return (
            None if self.first_token_at is None else max(0.0, self.first_token_at - self.arrived_at)
        )

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; of a completed stream only."""
        if self.first_token_at is None or self.output < 2 or self.outcome != COMPLETED:
            return None
        return max(0.0, self.ended_at - self.first_token_at) / (self.output - 1)


@dataclass(frozen=True)
class ProxyLog:
    """All requests of one run of a proxy, at least one.

    Attributes:
        log: name of the file.
        requests: in the order in which they ended.
        cut_lines: lines of the log that were cut off, and left out.
    """

    log: str
    requests: tuple[LoggedRequest, ...]
    cut_lines: int = 0

    @cached_property
    def by_worker(self) -> dict[str, tuple[LoggedRequest, ...]]:
        """Requests by the worker that had them last, numbers in names in order."""
        by_name: dict[str, list[LoggedRequest]] = {}
        for request in self.requests:
            if request.worker is not None:
                by_name.setdefault(request.worker, []).append(request)
        return {name: tuple(by_name[name]) for name in sorted(by_name, key=_natural)}

    @property
    def workers(self) -> tuple[str, ...]:
        """Those that had a request."""
        return tuple(self.by_worker)

    @cached_property
    def bound_requests(self) -> tuple[LoggedRequest, ...]:
        """Requests that a worker had."""
        return tuple(request for request in self.requests if request.bound_at is not None)

    @property
    def begin(self) -> float:
        """When the first request arrived."""
        return min(request.arrived_at for request in self.requests)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        return max(request.ended_at for request in self.requests) - self.begin


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", name)]
