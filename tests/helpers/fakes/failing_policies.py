"""Policies that make mistakes."""

from collections.abc import Iterable, Mapping, Sequence

from helpers.fakes.late_binding_policy import LateBinding

from equipoise.balancer.requests.policy import (
    Assignment,
    Decision,
    Request,
    RequestId,
    WorkerChange,
)


class FailingPolicy(LateBinding):
    """Raises at one of its events, before anything of it has happened.

    Attributes:
        left: events until then.
        failed: whether it has.
        after: events since.
    """

    def __init__(self, slots: Sequence[int], rooms: Sequence[int | None] = ()) -> None:
        super().__init__(slots, rooms)
        self.left = 1 << 30
        self.failed = False
        self.after = 0

    def on_arrival(self, request: Request) -> Decision:
        self._begin()
        return self._end(super().on_arrival(request))

    def on_tokens(
        self, counts: Mapping[RequestId, int], finished: Iterable[RequestId] = ()
    ) -> Decision:
        self._begin()
        return self._end(super().on_tokens(counts, finished))

    def on_abort(self, request: RequestId) -> Decision:
        self._begin()
        return self._end(super().on_abort(request))

    def on_worker_change(self, change: WorkerChange) -> Decision:
        self._begin()
        return self._end(super().on_worker_change(change))

    def _begin(self) -> None:
        self._count()

    def _end(self, decision: Decision) -> Decision:
        return decision

    def _count(self) -> None:
        self.after += self.failed
        self.left -= 1
        if self.left == -1:
            self.failed = True
            raise ArithmeticError("a mistake")


class PolicyFailingAfterEvent(FailingPolicy):
    """Raises when all of the event has happened."""

    def _begin(self) -> None:
        """Nothing yet."""

    def _end(self, decision: Decision) -> Decision:
        self._count()
        return decision


class UnknownWorkerPolicy(LateBinding):
    """Binds to a worker that there is not."""

    def on_arrival(self, request: Request) -> Decision:
        return Decision((Assignment(request.id, 99),))


class FixedWorkers(LateBinding):
    """Takes no worker but those that it was made with."""

    most = 1

    def on_worker_change(self, change: WorkerChange) -> Decision:
        if change.worker >= self.most:
            raise IndexError(f"worker {change.worker}")
        return super().on_worker_change(change)


class TwoWorkers(FixedWorkers):
    """Takes one more."""

    most = 2
