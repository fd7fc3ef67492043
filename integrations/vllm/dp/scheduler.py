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
        front: the client.
        ledger: with the policy.
        hold_seconds: a request waits in the policy no longer.
        clock: seconds, from anywhere.

    Attributes:
        clock: the same.
        mode: who chooses.
    """

    def __init__(
        self,
        front: ClientView,
        ledger: RequestTable,
        hold_seconds: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._front, self._ledger = front, ledger
        self._hold_seconds, self.clock = hold_seconds, clock
        self._meters = RoutingMetrics()
        self._counts: Counter[str] = Counter()
        self._ended: list[str] = []
        self._flushing: asyncio.Handle | None = None
        self._watching: asyncio.Task[None] | None = None
        self._carrying: set[asyncio.Task[None]] = set()
        self.mode = RoutingMode.POLICY

    @property
    def tickets(self) -> tuple[DpRequest, ...]:
        """Of requests that have not ended."""
        return tuple(self._ledger.tickets.values())

    @property
    def policy(self) -> RoutingPolicy:
        """What chooses, as long as `mode` says so; only to be looked at."""
        return self._ledger.policy

    async def add(self, request: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        """A request arrived, or a further part of one: hand it over, now or later.

        Raises what `send` raises, where it is now.
        """
        ticket = self._ledger.tickets.get(request.request_id)
        if ticket is not None and ticket.messages:
            ticket.messages.append(request)
        elif (
            ticket is not None or self.mode is RoutingMode.ENGINE or not self._front.routes(request)
        ):
            await send(request)
        else:
            await self._enter(request, send)

    async def _enter(self, request: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        ticket = DpRequest(
            id=request.request_id,
            size=self._size(request),
            rank=self._front.rank_of(request),
            since=self.clock(),
            send=send,
            messages=[request],
        )
        self._ledger.enter(ticket)
        self._do(partial(self._arrived, ticket), apart_from=ticket)
        if ticket.stage is DpRequestState.HELD:
            self._watch()
            return
        try:
            await _deliver(ticket)
        except Exception:
            self._do(partial(self._ledger.drop, ticket))
            raise

    def _size(self, request: Any) -> int:
        """No more than a rank holds, or it would wait for one that does."""
        return min(prompt_length(request), self._front.ranks.room or prompt_length(request))

    def _arrived(self, ticket: DpRequest) -> None:
        self._settle()
        self._ledger.arrive(ticket)

    def choose(self, request: Any, rule: Callable[[Any], Any]) -> Any:
        """The engine for a request that is handed over; the engine's `rule` keeps its books.

        A rank that is asked for is the rule's first concern, so a choice is told to it as one.
        """
        ticket = self._ledger.tickets.get(request.request_id)
        worker = None if ticket is None else self._worker_of(ticket)
        if worker is None:
            return rule(request)
        asked, request.data_parallel_rank = request.data_parallel_rank, worker
        try:
            return rule(request)
        finally:
            request.data_parallel_rank = asked

    def _worker_of(self, ticket: DpRequest) -> int | None:
        """None: the engine's own rule chooses."""
        if ticket.stage in POLICY_TRACKED_STATES:
            return ticket.worker  # a further part of it, which vLLM before 0.32 sends anywhere
        if ticket.stage is DpRequestState.HELD:
            return None
        worker = mark_sent(ticket)
        if worker is not None:
            self._meters.routed(worker)
        return worker

    async def abort(
        self, requests: Sequence[str], abort: Callable[[list[str]], Awaitable[None]]
    ) -> None:
        """Requests were given up: what the engine has not seen, it never will."""
        tickets = self._ledger.tickets
        known = [tickets[one] for one in requests if one in tickets]
        unsent = [one for one in known if one.stage in UNSENT_STATES]
        for ticket in known:
            if ticket.stage is not DpRequestState.LEAVING:
                self._meters.aborted()
            if ticket.stage is DpRequestState.SENT:
                ticket.stage = DpRequestState.LEAVING
            if ticket.stage not in UNSENT_STATES:
                # Further parts that are about to be handed over would come after the abort, and
                # the engine would take the first of them for a new request.
                ticket.messages.clear()
        for ticket in unsent:
            messages = list(ticket.messages)
            self._do(partial(self._ledger.drop, ticket))
            if releases_remote_kv(messages[0]) and not self._front.dead:
                messages[0].abort_immediately = True
                await ticket.send(messages[0])
        mine = {one.id for one in unsent}
        others = [one for one in requests if one not in mine]
        if others:
            await abort(others)

    def close(self) -> None:
        """The client is gone, or the process ends, which is to find no policy of C++ left."""
        self.mode = RoutingMode.ENGINE
        self._ledger.close()

    def end_held(self) -> None:
        """The engine gives up all that it has: so is what it would have had."""
        unsent = [one for one in self._ledger.tickets.values() if one.stage in UNSENT_STATES]
        for ticket in unsent:
            self._do(partial(self._ledger.drop, ticket))
        self._front.end((one.id for one in unsent), "ABORT")

    def observe(self, outputs: Any) -> None:
        """What a step of an engine brought; told to the policy with what else this turn brings."""
        tickets = self._ledger.tickets
        for output in outputs.outputs:
            if output.new_token_ids and output.request_id in tickets:
                self._counts[output.request_id] += len(output.new_token_ids)
        self._ended += [one for one in outputs.finished_requests or () if one in tickets]
        if (self._counts or self._ended) and self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._do(self._settle)

    def _settle(self) -> None:
        """Tell the policy what has happened so far."""
        counts, ended = self._counts, self._ended
        self._counts, self._ended = Counter(), []
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self._ledger.step(counts, ended)
        if self.mode is RoutingMode.POLICY:
            self._ledger.report(self._front.reports(self._ledger.shares))

    def tick(self) -> None:
        """Look at reports, and at what is held too long."""
        self._do(self._settle)
        now = self.clock()
        for ticket in list(self._ledger.held.values()):
            if now - ticket.since < self._hold_seconds:
                break
            if ticket.stage is not DpRequestState.HELD:
                continue  # a slot was left to it by one that is set beside
            self._meters.overdue()
            self._do(partial(self._ledger.set_beside, ticket))
            self._carry([ticket])

    def _do(self, event: Callable[[], None], apart_from: DpRequest | None = None) -> None:
        """An event of the ledger, and what follows; a policy that fails is not called again."""
        try:
            event()
            ready: Iterable[DpRequest] = self._ledger.take_bound()
        except Exception:
            ready = self._give_up()
        self._carry([one for one in ready if one is not apart_from])
        self._meters.held(len(self._ledger.held))

    def _give_up(self) -> list[DpRequest]:
        LOG.exception("equipoise: the policy failed; the engine's own rule routes from now on")
        self._meters.failed()
        self.mode = RoutingMode.ENGINE
        return self._ledger.dissolve()

    def _carry(self, tickets: list[DpRequest]) -> None:
        if tickets:
            task = asyncio.get_running_loop().create_task(self._deliver_all(tickets))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

    async def _deliver_all(self, tickets: list[DpRequest]) -> None:
        for ticket in tickets:
            try:
                await _deliver(ticket)
            except Exception:
                self._undelivered(ticket)

    def _undelivered(self, ticket: DpRequest) -> None:
        self._do(partial(self._ledger.drop, ticket))
        if self._front.dead:
            return  # the engine tells everybody who waits
        LOG.exception("equipoise: request %s could not be handed over", ticket.id)
        self._front.end([ticket.id], "ERROR")

    def _watch(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while self._ledger.held and not self._front.dead:
            await asyncio.sleep(POLL_SECONDS)
            self.tick()


async def _deliver(ticket: DpRequest) -> None:
    """Hand over what waits of it; nothing, where it was given up meanwhile."""
    while ticket.messages:
        await ticket.send(ticket.messages.pop(0))
