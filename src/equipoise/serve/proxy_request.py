"""A request of the proxy: what its own task waits for, and what ends that wait."""

import asyncio
import logging
from collections.abc import Sequence

from equipoise.balancer.requests.dispatcher import (
    BoundToWorker,
    CloseReason,
    DispatchedRequest,
    FailureAction,
    InvalidAssignment,
    RequestClosed,
)
from equipoise.hal.errors import EquipoiseError
from equipoise.serve.cancel_scope import CancelReason, CancelScope, ScopeCancelled
from equipoise.serve.outcomes import (
    RETRY_AFTER,
    ErrorResponse,
    RequestOutcome,
    RequestRefused,
    overloaded,
)

LOG = logging.getLogger("equipoise.route")


class ProxyRequest(DispatchedRequest):
    """A request whose own task waits for a worker, and then relays its answer.

    Attributes:
        scope: of the part of its task that a lost worker, or a shutdown, ends.
    """

    def __init__(
        self,
        number: int,
        size: int,
        required_worker: int | None = None,
        blocks: Sequence[int] = (),
    ) -> None:
        super().__init__(number, size, required_worker, blocks)
        self.scope: CancelScope | None = None
        self._binding: asyncio.Future[BoundToWorker] | None = None

    async def wait_until_bound(self) -> BoundToWorker:
        """The worker that it is bound to, as soon as there is one; raises as `check_open`."""
        self.check_open()
        if isinstance(self.status, BoundToWorker):
            return self.status
        self._binding = asyncio.get_running_loop().create_future()
        return await self._binding

    def check_open(self) -> None:
        """Raise where it is closed.

        Raises: RequestRefused (429, 503) for a full queue, and for a required worker that does not
            serve; ScopeCancelled by a timeout or a lost worker; EquipoiseError where the policy
            refused it.
        """
        match self.status:
            case RequestClosed(CloseReason.QUEUE_FULL, message):
                raise overloaded(message)
            case RequestClosed(CloseReason.WORKER_UNAVAILABLE, message):
                outcome = RequestOutcome.WORKERS_FAILED
                raise RequestRefused(ErrorResponse(503, outcome, message, "no_worker", RETRY_AFTER))
            case RequestClosed(CloseReason.POLICY_FAILED):
                raise EquipoiseError("the policy refused it")
            case RequestClosed(reason):
                raise ScopeCancelled(_cancel_reason(reason))

    def on_bound(self, bound: BoundToWorker) -> None:
        """Wake its task."""
        if self._binding is not None and not self._binding.done():
            self._binding.set_result(bound)

    def on_requeued(self) -> None:
        """End the attempt that is under way."""
        self.cancel(CancelReason.LOST_BEFORE_FIRST_TOKEN)

    def on_closed(self, reason: CloseReason) -> None:
        """End its task."""
        self.cancel(_cancel_reason(reason))

    def cancel(self, reason: CancelReason) -> None:
        """End what its task is at."""
        if self.scope is not None:
            self.scope.cancel(reason)


def _cancel_reason(reason: CloseReason) -> CancelReason:
    timed_out = reason is CloseReason.QUEUE_TIMEOUT
    return CancelReason.NO_FREE_SLOT if timed_out else CancelReason.WORKER_LOST


def skip_failed_event(error: Exception) -> FailureAction:
    """Log a failure of the policy, and go on: it must cost a log line, not the proxy."""
    if isinstance(error, InvalidAssignment):
        LOG.error("%s", error)
    else:
        LOG.error("the policy failed at an event", exc_info=error)
    return FailureAction.SKIP_EVENT
