"""A front end with a native policy, told event by event, that decides when it is asked."""

from collections.abc import Sequence
from math import nan

from equipoise import _native
from equipoise.balancer.requests.policy import Capacity, WorkerReport
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings
from equipoise.balancer.requests.request_router import UNLIMITED


class NativeFront:
    """As `SlowFront`, by the native core."""

    def __init__(self, settings: RoutingPolicySettings, workers: Sequence[Capacity]) -> None:
        self.router = _native.Router(settings.native(), len(workers), UNLIMITED, UNLIMITED)
        for number, worker in enumerate(workers):
            slots, room = worker.slots or UNLIMITED, worker.kv_tokens or UNLIMITED
            self.router.set_capacity(number, slots, room)
        self.handles: dict[int, int] = {}

    def count_steps_by_caller(self) -> None:
        """Each `dispatch` is a step."""
        self.router.count_steps_by_caller()

    def arrive(
        self, name: int, size: int, pinned: int | None, hits: Sequence[int], expected: int | None
    ) -> None:
        worker = -1 if pinned is None else pinned
        expected_tokens = -1 if expected is None else expected
        self.handles[name] = self.router.arrive(size, worker, list(hits), expected_tokens)

    def grow(self, name: int, tokens: int) -> None:
        self.router.advance([self.handles[name]], [tokens], [], nan)

    def finish(self, name: int) -> None:
        self.router.advance([], [], [self.handles.pop(name)], nan)

    def abort(self, name: int) -> None:
        self.router.abort(self.handles.pop(name))

    def report(self, worker: int, report: WorkerReport) -> None:
        figures = report.waiting, report.running, report.tokens, report.kv_usage
        self.router.report(worker, *figures)

    def dispatch(self) -> list[tuple[int, int]]:
        names = {handle: name for name, handle in self.handles.items()}
        return [(names[handle], worker) for handle, worker in self.router.dispatch()]
