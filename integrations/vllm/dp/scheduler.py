"""Where requests of one client meet the policy: called by the event loop's own thread only.

What is held has been taken from the engine's front end all the same: its answer is awaited as any
other, so that who gives it up, or the death of the engine, finds it where the engine keeps it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum, unique
from functools import partial
from time import monotonic
from typing import Any

from equipoise.balancer.requests.policy import RoutingPolicy
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
"""Seconds between two looks at what is held, and at what the ranks report meanwhile."""


@unique
class RoutingMode(Enum):
    """Who chooses."""

    POLICY = "policy"
    ENGINE = "engine"
    """The policy has failed, and is not called any more."""


class DpRequestScheduler:
    """Hands requests over as a policy says.

    Args:
        client: the client.
        table: with the policy.
        max_queue_seconds: a request waits in the policy no longer.
        clock: seconds, from anywhere.

    Attributes:
        clock: the same.
        mode: who chooses.
    """

    def __init__(
        self,
        client: ClientView,
        table: RequestTable,
        max_queue_seconds: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._client, self._table = client, table
        self._max_queue_seconds, self.clock = max_queue_seconds, clock
        self._metrics = RoutingMetrics()
        self._counts: Counter[str] = Counter()
        self._finished: list[str] = []
        self._flush_handle: asyncio.Handle | None = None
        self._poll_task: asyncio.Task[None] | None = None
        self._send_tasks: set[asyncio.Task[None]] = set()
        self.mode = RoutingMode.POLICY

    @property
    def requests(self) -> tuple[DpRequest, ...]:
        """Of requests that have not ended."""
        return tuple(self._table.requests.values())

    @property
    def policy(self) -> RoutingPolicy:
        """What chooses, as long as `mode` says so; only to be looked at."""
        return self._table.policy

    async def add(self, request: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        """A request arrived, or a further part of one: hand it over, now or later.

        Raises what `send` raises, where it is now.
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
        """No more than a rank holds, or it would wait for one that does."""
        return min(
            prompt_length(request), self._client.ranks.kv_token_limit or prompt_length(request)
        )

    def _arrived(self, tracked: DpRequest) -> None:
        self._flush_events()
        self._table.notify_policy(tracked)

    def choose_engine(self, request: Any, engine_rule: Callable[[Any], Any]) -> Any:
        """The engine for a request that is handed over; the engine's `engine_rule` keeps its books.

        A rank that is asked for is the rule's first concern, so a choice is told to it as one.
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
        """None: the engine's own rule chooses."""
        if tracked.state in POLICY_TRACKED_STATES:
            # A further part of its input: vLLM before 0.32 would send it to any rank.
            return tracked.assigned_rank
        if tracked.state is DpRequestState.QUEUED:
            return None
        rank = mark_sent(tracked)
        if rank is not None:
            self._metrics.routed(rank)
        return rank

    async def abort(
        self, request_ids: Sequence[str], abort: Callable[[list[str]], Awaitable[None]]
    ) -> None:
        """Requests were given up: what the engine has not seen, it never will."""
        requests = self._table.requests
        tracked_requests = [requests[one] for one in request_ids if one in requests]
        unsent = [one for one in tracked_requests if one.state in UNSENT_STATES]
        for tracked in tracked_requests:
            if tracked.state is not DpRequestState.ABORTING:
                self._metrics.aborted()
            if tracked.state is DpRequestState.RUNNING:
                tracked.state = DpRequestState.ABORTING
            if tracked.state not in UNSENT_STATES:
                # Further parts that are about to be handed over would come after the abort, and
                # the engine would take the first of them for a new request.
                tracked.messages.clear()
        for tracked in unsent:
            messages = list(tracked.messages)
            self._apply_event(partial(self._table.remove, tracked))
            if releases_remote_kv(messages[0]) and not self._client.engine_dead:
                messages[0].abort_immediately = True
                await tracked.send(messages[0])
        unsent_ids = {one.id for one in unsent}
        others = [one for one in request_ids if one not in unsent_ids]
        if others:
            await abort(others)

    def close(self) -> None:
        """The client is gone, or the process ends, which is to find no policy of C++ left."""
        self.mode = RoutingMode.ENGINE
        self._table.close()

    def abort_queued(self) -> None:
        """The engine gives up all that it has: so is what it would have had."""
        unsent = [one for one in self._table.requests.values() if one.state in UNSENT_STATES]
        for tracked in unsent:
            self._apply_event(partial(self._table.remove, tracked))
        self._client.finish_requests((one.id for one in unsent), "ABORT")

    def on_outputs(self, outputs: Any) -> None:
        """What a step of an engine brought; told to the policy with what else this turn brings."""
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
        """Tell the policy what has happened so far."""
        counts, ended = self._counts, self._finished
        self._counts, self._finished = Counter(), []
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        self._table.on_step(counts, ended)
        if self.mode is RoutingMode.POLICY:
            self._table.on_reports(self._client.new_reports(self._table.rank_loads))

    def poll(self) -> None:
        """Look at reports, and at what is held too long."""
        self._apply_event(self._flush_events)
        now = self.clock()
        for tracked in list(self._table.queued.values()):
            if now - tracked.arrived_at < self._max_queue_seconds:
                break
            if tracked.state is not DpRequestState.QUEUED:
                continue  # a slot was left to it by one that is set beside
            self._metrics.fell_back()
            self._apply_event(partial(self._table.fall_back, tracked))
            self._send_soon([tracked])

    def _apply_event(self, event: Callable[[], None], apart_from: DpRequest | None = None) -> None:
        """An event of the ledger, and what follows; a policy that fails is not called again."""
        try:
            event()
            ready: Iterable[DpRequest] = self._table.take_assigned()
        except Exception:
            ready = self._fall_back()
        self._send_soon([one for one in ready if one is not apart_from])
        self._metrics.queued(len(self._table.queued))

    def _fall_back(self) -> list[DpRequest]:
        LOG.exception("equipoise: the policy failed; the engine's own rule routes from now on")
        self._metrics.failed()
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
            return  # the engine tells everybody who waits
        LOG.exception("equipoise: request %s could not be handed over", tracked.id)
        self._client.finish_requests([tracked.id], "ERROR")

    def _start_polling(self) -> None:
        if self._poll_task is None or self._poll_task.done():
            self._poll_task = asyncio.get_running_loop().create_task(self._poll_loop())

    async def _poll_loop(self) -> None:
        while self._table.queued and not self._client.engine_dead:
            await asyncio.sleep(POLL_SECONDS)
            self.poll()


async def _deliver(tracked: DpRequest) -> None:
    """Hand over what waits of it; nothing, where it was given up meanwhile."""
    while tracked.messages:
        await tracked.send(tracked.messages.pop(0))
