"""Schedules the requests of one client: sends each when the policy has assigned a rank.

Runs on the thread of the event loop only, so it needs no locks. A queued request has been accepted
from vLLM's front end, which awaits its output like any other; so aborts and the death of the engine
reach it the usual way.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum, unique
from functools import partial
from time import monotonic
from typing import Any

from equipoise.balancer.requests.policy import STEP_TIMEOUT_SECONDS, RoutingPolicy
from equipoise.integrations.vllm.dp.client_view import ClientView, prompt_length, releases_remote_kv
from equipoise.integrations.vllm.dp.metrics import RoutingMetrics
from equipoise.integrations.vllm.dp.request_table import (
    POLICY_TRACKED_STATES,
    UNSENT_STATES,
    DpRequest,
    DpRequestState,
    RequestTable,
    mark_sent,
)

LOG = logging.getLogger("vllm.equipoise")
POLL_SECONDS = 0.05
"""Interval for checking queued requests for timeouts, and for reading the ranks' reports."""


@unique
class RoutingMode(Enum):
    """Who chooses ranks."""

    POLICY = "policy"
    ENGINE = "engine"
    """vLLM's own rule: the policy has failed and is not called any more."""


class DpRequestScheduler:
    """Sends the requests of one client to the ranks that a policy chooses.

    Args:
        client: the client.
        table: the requests, and the policy.
        queue_timeout: longest time that a request waits in the policy.
        clock: monotonic seconds.

    Attributes:
        clock: as above.
        mode: who chooses ranks.
    """

    def __init__(
        self,
        client: ClientView,
        table: RequestTable,
        queue_timeout: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._client, self._table = client, table
        self._queue_timeout, self.clock = queue_timeout, clock
        self._metrics = RoutingMetrics()
        self._counts: Counter[str] = Counter()
        self._finished: list[str] = []
        self._flush_handle: asyncio.Handle | None = None
        self._poll_task: asyncio.Task[None] | None = None
        self._due_since: float | None = None
        self._send_tasks: set[asyncio.Task[None]] = set()
        self.mode = RoutingMode.POLICY

    @property
    def requests(self) -> tuple[DpRequest, ...]:
        """The requests that have not ended."""
        return tuple(self._table.requests.values())

    @property
    def policy(self) -> RoutingPolicy:
        """The policy, for inspection only; in use while `mode` is `POLICY`."""
        return self._table.policy

    async def add(self, request: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        """Take a request, or a further part of one, and send it now or later.

        Raises what `send` raises if it is sent now.
        """
        tracked = self._table.requests.get(request.request_id)
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
        tracked = DpRequest(
            id=request.request_id,
            prompt_tokens=self._size(request),
            required_rank=self._client.required_rank(request),
            arrived_at=self.clock(),
            send=send,
            messages=[request],
        )
        self._table.add(tracked)
        self._apply_event(partial(self._arrived, tracked), apart_from=tracked)
        if tracked.state is DpRequestState.QUEUED:
            self._start_polling()
            return
        try:
            await _deliver(tracked)
        except Exception:
            self._apply_event(partial(self._table.remove, tracked))
            raise

    def _size(self, request: Any) -> int:
        """Return the prompt length, at most what a rank holds: more would wait for ever."""
        return min(
            prompt_length(request), self._client.ranks.kv_token_limit or prompt_length(request)
        )

    def _arrived(self, tracked: DpRequest) -> None:
        self._flush_events()
        self._table.notify_policy(tracked)

    def choose_engine(self, request: Any, engine_rule: Callable[[Any], Any]) -> Any:
        """Return the engine for a request that is being sent; `engine_rule` does vLLM's accounting.

        vLLM's rule honours `request.data_parallel_rank`, so the assigned rank is passed that way
        and the original value restored.
        """
        tracked = self._table.requests.get(request.request_id)
        rank = None if tracked is None else self._rank_for(tracked)
        if rank is None:
            return engine_rule(request)
        original_rank, request.data_parallel_rank = request.data_parallel_rank, rank
        try:
            return engine_rule(request)
        finally:
            request.data_parallel_rank = original_rank

    def _rank_for(self, tracked: DpRequest) -> int | None:
        """Return the rank for a request; None: vLLM's own rule chooses."""
        if tracked.state in POLICY_TRACKED_STATES:
            # A further part of its input: vLLM before 0.32 would send it to any rank.
            return tracked.assigned_rank
        if tracked.state is DpRequestState.QUEUED:
            return None
        rank = mark_sent(tracked)
        if rank is not None:
            self._metrics.count_routed(rank)
        return rank

    async def abort(
        self, request_ids: Sequence[str], abort: Callable[[list[str]], Awaitable[None]]
    ) -> None:
        """Abort requests; those that the engine has not got are never sent."""
        requests = self._table.requests
        tracked_requests = [requests[one] for one in request_ids if one in requests]
        unsent = [one for one in tracked_requests if one.state in UNSENT_STATES]
        for tracked in tracked_requests:
            if tracked.state is not DpRequestState.ABORTING:
                self._metrics.count_aborted()
            if tracked.state is DpRequestState.RUNNING:
                tracked.state = DpRequestState.ABORTING
            if tracked.state not in UNSENT_STATES:
                # Further parts that are still to be sent would arrive after the abort, and the
                # engine would take the first of them for a new request.
                tracked.messages.clear()
        for tracked in unsent:
            messages = list(tracked.messages)
            self._apply_event(partial(self._table.remove, tracked))
            if releases_remote_kv(messages[0]) and not self._client.engine_dead:
                messages[0].abort_immediately = True
                await tracked.send(messages[0])
        unsent_ids = {one.id for one in unsent}
        sent_ids = [one for one in request_ids if one not in unsent_ids]
        if sent_ids:
            await abort(sent_ids)

    def close(self) -> None:
        """Drop the policy; at the end of the client or of the process, before C++ objects are
        unloaded."""
        self.mode = RoutingMode.ENGINE
        self._table.close()

    def abort_queued(self) -> None:
        """Abort all requests that were not sent, because the engine aborts all that it has."""
        unsent = [one for one in self._table.requests.values() if one.state in UNSENT_STATES]
        for tracked in unsent:
            self._apply_event(partial(self._table.remove, tracked))
        self._client.finish_requests((one.id for one in unsent), "ABORT")

    def on_outputs(self, outputs: Any) -> None:
        """Record the outputs of a rank's step.

        The policy is notified once per turn of the event loop, of all outputs together; it waits
        for those of the other ranks.
        """
        requests = self._table.requests
        for output in outputs.outputs:
            if output.new_token_ids and output.request_id in requests:
                self._counts[output.request_id] += len(output.new_token_ids)
        self._finished += [one for one in outputs.finished_requests or () if one in requests]
        if (self._counts or self._finished) and self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._apply_event(self._flush_events)

    def _flush_events(self) -> None:
        """Notify the policy of what has been recorded."""
        counts, end_events = self._counts, self._finished
        self._counts, self._finished = Counter(), []
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        self._table.on_step(counts, end_events)
        if self.mode is RoutingMode.POLICY:
            self._table.on_reports(self._client.new_reports(self._table.rank_loads))

    def poll(self) -> None:
        """Read reports, have the policy decide if the rest of a step does not come, and send
        requests that have waited too long by vLLM's own rule."""
        self._apply_event(self._flush_events)
        now = self.clock()
        if self._due_since is not None and now - self._due_since >= STEP_TIMEOUT_SECONDS:
            self._apply_event(self._table.decide)
        for tracked in list(self._table.queued.values()):
            if now - tracked.arrived_at < self._queue_timeout:
                break
            if tracked.state is not DpRequestState.QUEUED:
                continue  # was assigned when the request before it was removed
            self._metrics.count_fallback()
            self._apply_event(partial(self._table.fall_back, tracked))
            self._send_soon([tracked])

    def _apply_event(self, event: Callable[[], None], apart_from: DpRequest | None = None) -> None:
        """Apply an event to the table and send what was assigned; on an error stop using the
        policy."""
        try:
            event()
            ready: Iterable[DpRequest] = self._table.take_assigned()
        except Exception:
            ready = self._fall_back()
        if not self._table.due:
            self._due_since = None
        elif self._due_since is None:
            self._due_since = self.clock()
        self._send_soon([one for one in ready if one is not apart_from])
        self._metrics.set_queued(len(self._table.queued))

    def _fall_back(self) -> list[DpRequest]:
        LOG.exception("equipoise: the policy failed; the engine's own rule routes from now on")
        self._metrics.count_failure()
        self.mode = RoutingMode.ENGINE
        return self._table.fall_back_all()

    def _send_soon(self, requests: list[DpRequest]) -> None:
        if requests:
            task = asyncio.get_running_loop().create_task(self._deliver_all(requests))
            self._send_tasks.add(task)
            task.add_done_callback(self._send_tasks.discard)

    async def _deliver_all(self, requests: list[DpRequest]) -> None:
        for tracked in requests:
            try:
                await _deliver(tracked)
            except Exception:
                self._on_send_failed(tracked)

    def _on_send_failed(self, tracked: DpRequest) -> None:
        self._apply_event(partial(self._table.remove, tracked))
        if self._client.engine_dead:
            return  # vLLM fails every request itself
        LOG.exception("equipoise: request %s could not be sent", tracked.id)
        self._client.finish_requests([tracked.id], "ERROR")

    def _start_polling(self) -> None:
        if self._poll_task is None or self._poll_task.done():
            self._poll_task = asyncio.get_running_loop().create_task(self._poll_loop())

    async def _poll_loop(self) -> None:
        while self._table.queued and not self._client.engine_dead:
            await asyncio.sleep(POLL_SECONDS)
            self.poll()


async def _deliver(tracked: DpRequest) -> None:
    """Send the waiting messages of a request; none if it was aborted meanwhile."""
    while tracked.messages:
        await tracked.send(tracked.messages.pop(0))
