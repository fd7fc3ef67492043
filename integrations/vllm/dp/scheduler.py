"""Schedules the requests of one client: sends each when the policy has assigned a rank.

A thin transport over `RequestDispatcher`. It runs on the thread of the event loop only, so it needs
no locks. A queued request has been accepted from vLLM's front end, which awaits its output like any
other; so aborts and the death of the engine reach it the usual way.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, unique
from time import monotonic
from typing import Any

from equipoise.balancer.requests.dispatcher import (
    Aborting,
    BoundToWorker,
    CloseReason,
    DispatchedRequest,
    FailureAction,
    Queued,
    RequestDispatcher,
    Timer,
)
from equipoise.balancer.requests.policy import RoutingPolicy
from equipoise.balancer.requests.policy_messages import SharedPolicyLost
from equipoise.integrations.vllm.dp.client_view import (
    ClientView,
    RankLoad,
    prompt_blocks,
    prompt_length,
    releases_remote_kv,
)
from equipoise.integrations.vllm.dp.metrics import RoutingMetrics

LOG = logging.getLogger("vllm.equipoise")
POLL_SECONDS = 0.05
"""Interval for reading the ranks' reports while requests are queued."""


@unique
class RoutingMode(Enum):
    """Who chooses ranks."""

    POLICY = "policy"
    ENGINE = "engine"
    """vLLM's own rule: the policy has failed and is not called any more."""


@unique
class Delivery(Enum):
    """How far a request is on its way to the engine."""

    ENTERING = "entering"
    """Whoever adds it sends it, unless it has to wait."""
    HELD = "held"
    """It waits for a rank."""
    READY = "ready"
    """It has a rank, or vLLM's own rule will choose one; a task is about to send it."""
    SENT = "sent"
    """The engine has it, and reports when it ends."""


class RunningLoopClock:
    """The event loop that runs: vLLM may create its client before there is one."""

    time = staticmethod(monotonic)

    def call_soon(self, callback: Callable[[], object]) -> Timer:
        """As the loop's; nothing is called at the end of the process, when none runs any more."""
        try:
            return asyncio.get_running_loop().call_soon(callback)
        except RuntimeError:
            return NeverCalled()

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """As the loop's."""
        return asyncio.get_running_loop().call_later(delay, callback)


class NeverCalled:
    """A timer that has nothing to cancel."""

    def cancel(self) -> None:
        """As `Timer`."""


class DpRequest(DispatchedRequest):
    """A request that has not ended; closed, but not ended, once vLLM's own rule routes it.

    Attributes:
        send: sends a message to the engine as vLLM itself would.
        messages: messages to send, in order; streamed input has several.
        delivery: how far it is on its way.
    """

    def __init__(
        self,
        message: Any,
        size: int,
        required_rank: int | None,
        send: Callable[[Any], Awaitable[None]],
        may_be_sent: Callable[["DpRequest", CloseReason | None], None],
    ) -> None:
        super().__init__(message.request_id, size, required_rank, prompt_blocks(message))
        self.send, self._may_be_sent = send, may_be_sent
        self.messages: list[Any] = [message]
        self.delivery = Delivery.ENTERING

    @property
    def id(self) -> str:
        """vLLM's request id."""
        return str(self.request_id)

    def on_bound(self, bound: BoundToWorker) -> None:
        """The policy has assigned a rank."""
        self._may_be_sent(self, None)

    def on_closed(self, reason: CloseReason) -> None:
        """The policy does not know it any more; vLLM's own rule chooses its rank."""
        self._may_be_sent(self, reason)


class DpRequestScheduler:
    """Sends the requests of one client to the ranks that a policy chooses.

    Args:
        client: the client.
        policy: of as many workers as it has ranks.
        queue_timeout: longest time in seconds that a request waits in the policy.

    Attributes:
        dispatcher: of the requests that the policy knows.
    """

    def __init__(self, client: ClientView, policy: RoutingPolicy, queue_timeout: float) -> None:
        self._client, self._ranks = client, range(client.ranks.count)
        self._metrics = RoutingMetrics()
        self._requests: dict[str, DpRequest] = {}
        self._send_tasks: set[asyncio.Task[None]] = set()
        self._poll_task: asyncio.Task[None] | None = None
        self.dispatcher = RequestDispatcher(
            policy,
            client.ranks.count,
            RunningLoopClock(),
            self._policy_failed,
            queue_timeout=queue_timeout,
        )

    @property
    def requests(self) -> tuple[DpRequest, ...]:
        """The requests that have not ended."""
        return tuple(self._requests.values())

    @property
    def policy(self) -> RoutingPolicy | None:
        """The policy, for inspection only; None while `mode` is `ENGINE`."""
        return self.dispatcher.policy

    @property
    def mode(self) -> RoutingMode:
        """Who chooses ranks."""
        return RoutingMode.ENGINE if self.policy is None else RoutingMode.POLICY

    async def add(self, request: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        """Take a request, or a further part of one, and send it now or later.

        Raises what `send` raises if it is sent now.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is not None and tracked.messages:
            tracked.messages.append(request)
        elif (
            tracked is not None
            or self.mode is RoutingMode.ENGINE
            or not self._client.policy_may_route(request)
        ):
            await send(request)
        else:
            await self._enter(request, send)

    async def _enter(self, request: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        rank = self._client.required_rank(request)
        tracked = DpRequest(request, self._size(request), rank, send, self._may_be_sent)
        self._requests[tracked.id] = tracked
        self.poll()
        self.dispatcher.submit(tracked)
        self._count_queued()
        if isinstance(tracked.status, Queued):
            tracked.delivery = Delivery.HELD
            self._start_polling()
            return
        try:
            await _deliver(tracked)
        except Exception:
            self._remove(tracked)
            raise

    def _size(self, request: Any) -> int:
        """Return the prompt length, at most what a rank holds: more would wait for ever."""
        length = prompt_length(request)
        return min(length, self._client.ranks.kv_token_limit or length)

    def choose_engine(self, request: Any, engine_rule: Callable[[Any], Any]) -> Any:
        """Return the engine for a request that is being sent; `engine_rule` does vLLM's accounting.

        vLLM's rule honours `request.data_parallel_rank`, so the assigned rank is passed that way
        and the original value restored.
        """
        tracked = self._requests.get(request.request_id)
        rank = None if tracked is None else self._rank_for(tracked)
        if rank is None:
            return engine_rule(request)
        original_rank, request.data_parallel_rank = request.data_parallel_rank, rank
        try:
            return engine_rule(request)
        finally:
            request.data_parallel_rank = original_rank

    def _rank_for(self, tracked: DpRequest) -> int | None:
        """Return the rank for a request, and note that it is sent; None: vLLM's own rule chooses.

        One that was sent before has a further part of its input: vLLM before 0.32 would send that
        to any rank.
        """
        rank = tracked.worker
        if tracked.delivery is not Delivery.SENT and not isinstance(tracked.status, Queued):
            tracked.delivery = Delivery.SENT
            if rank is not None:
                self._metrics.count_routed(rank)
        return rank

    async def abort(
        self, request_ids: Sequence[str], abort: Callable[[list[str]], Awaitable[None]]
    ) -> None:
        """Abort requests; those that the engine has not got are never sent."""
        tracked_requests = [self._requests[one] for one in request_ids if one in self._requests]
        unsent = [one for one in tracked_requests if one.delivery is not Delivery.SENT]
        for tracked in tracked_requests:
            if not isinstance(tracked.status, Aborting):
                self._metrics.count_aborted()
            if tracked.delivery is Delivery.SENT:
                self.dispatcher.begin_abort(tracked)
                # Further parts that are still to be sent would arrive after the abort, and the
                # engine would take the first of them for a new request.
                tracked.messages.clear()
        for tracked in unsent:
            first = tracked.messages[0]
            self._remove(tracked)
            if releases_remote_kv(first) and not self._client.engine_dead:
                first.abort_immediately = True
                await tracked.send(first)
        unsent_ids = {one.id for one in unsent}
        sent_ids = [one for one in request_ids if one not in unsent_ids]
        if sent_ids:
            await abort(sent_ids)

    def close(self) -> None:
        """Drop the policy; at the end of the client or of the process, before C++ objects are
        unloaded."""
        self.dispatcher.close()

    def abort_queued(self) -> None:
        """Abort all requests that were not sent, because the engine aborts all that it has."""
        unsent = [one for one in self.requests if one.delivery is not Delivery.SENT]
        for tracked in unsent:
            self._remove(tracked)
        self._client.finish_requests((one.id for one in unsent), "ABORT")

    def _remove(self, tracked: DpRequest) -> None:
        """Forget a request that the engine will not report the end of."""
        self._requests.pop(tracked.id, None)
        tracked.messages.clear()
        self.dispatcher.abort(tracked)
        self._count_queued()

    def on_outputs(self, outputs: Any) -> None:
        """Record the outputs of a rank's step.

        The policy is notified once per turn of the event loop, of all outputs together; it waits
        for those of the other ranks.
        """
        for output in outputs.outputs:
            tracked = self._requests.get(output.request_id)
            if output.new_token_ids and tracked is not None:
                total = tracked.tokens + len(output.new_token_ids)
                if isinstance(tracked.status, BoundToWorker):
                    self.dispatcher.start(tracked, tracked.status)
                self.dispatcher.report_tokens(tracked, total)
        for name in outputs.finished_requests or ():
            ended = self._requests.pop(name, None)
            if ended is not None:
                self.dispatcher.finish(ended)
        # After the dispatcher's notification, which is scheduled for the same turn.
        self.dispatcher.clock.call_soon(self.poll)

    def poll(self) -> None:
        """Hand the ranks' reports to the policy, if there are new ones."""
        if self.mode is RoutingMode.ENGINE:
            return
        for rank, report in enumerate(self._client.new_reports(self._rank_loads)):
            self.dispatcher.report_worker(rank, report)

    def _rank_loads(self) -> list[RankLoad]:
        """Loads by rank, of requests that it has got: those are what it reports."""
        sent = [one for one in self.requests if one.delivery is Delivery.SENT]
        by_rank = [[one for one in sent if one.worker == rank] for rank in self._ranks]
        return [RankLoad(len(own), sum(one.size + one.tokens for one in own)) for own in by_rank]

    def _policy_failed(self, error: Exception) -> FailureAction:
        LOG.error(
            "equipoise: the policy failed: %s; the engine's own rule routes from now on",
            error,
            # What has failed another process says; here only that is known that it has.
            exc_info=None if isinstance(error, SharedPolicyLost) else error,
        )
        self._metrics.count_failure()
        return FailureAction.STOP_POLICY

    def _count_queued(self) -> None:
        self._metrics.set_queued(self.dispatcher.queued)

    def _may_be_sent(self, tracked: DpRequest, closed: CloseReason | None) -> None:
        """Send a request that waits: the policy has assigned a rank, or let it go."""
        self._count_queued()
        if closed is CloseReason.QUEUE_TIMEOUT:
            self._metrics.count_fallback()
        if tracked.delivery is not Delivery.HELD:
            return  # whoever adds it sends it, or a task is about to, or it is sent
        tracked.delivery = Delivery.READY
        task = asyncio.get_running_loop().create_task(self._deliver_ready(tracked))
        self._send_tasks.add(task)
        task.add_done_callback(self._send_tasks.discard)

    async def _deliver_ready(self, tracked: DpRequest) -> None:
        try:
            await _deliver(tracked)
        except Exception:
            self._remove(tracked)
            if self._client.engine_dead:
                return  # vLLM fails every request itself
            LOG.exception("equipoise: request %s could not be sent", tracked.id)
            self._client.finish_requests([tracked.id], "ERROR")

    def _start_polling(self) -> None:
        if self._poll_task is None or self._poll_task.done():
            self._poll_task = asyncio.get_running_loop().create_task(self._poll_loop())

    async def _poll_loop(self) -> None:
        while self.dispatcher.queued and not self._client.engine_dead:
            await asyncio.sleep(POLL_SECONDS)
            self.poll()


async def _deliver(tracked: DpRequest) -> None:
    """Send the waiting messages of a request; none if it was aborted meanwhile."""
    while tracked.messages:
        await tracked.send(tracked.messages.pop(0))
