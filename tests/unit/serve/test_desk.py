"""Requests between their clients and a policy: whatever happens, the policy's protocol is kept."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest
from helpers.fakes.late_binding_policy import LateBinding
from helpers.harnesses.proxy_site import run
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.requests.factory import PolicyFactory, factory_of
from equipoise.balancer.requests.policy import (
    Assignment,
    Decision,
    Policy,
    Request,
    RequestId,
    WorkerState,
)
from equipoise.balancer.requests.router import RequestRouter
from equipoise.serve import events
from equipoise.serve.desk import Desk
from equipoise.serve.fleet import balance_of
from equipoise.serve.outcomes import Refused
from equipoise.serve.ticket import GONE, Bound, Held, Running, Ticket

WORKERS, SLOTS = 3, 2
SERVING = WorkerState.SERVING
STATES = st.sampled_from(WorkerState)
ACTS = st.one_of(
    st.tuples(st.just("arrive"), st.none() | st.integers(0, WORKERS - 1)),
    st.tuples(st.sampled_from(["begin", "made", "finish", "leave", "again"]), st.integers(0, 99)),
    st.tuples(st.sampled_from(["turn"]), st.none()),
    st.tuples(st.integers(0, WORKERS - 1), STATES),
    st.tuples(st.sampled_from(["set_aside", "take_back"]), st.integers(0, WORKERS - 1)),
)


class Play:
    """A desk over the strict policy, and what its callers would do."""

    def __init__(self, policy: Policy) -> None:
        self.desk = Desk(policy, WORKERS, most_held=5)
        self.tickets: list[Ticket] = []
        self.bounds: dict[int, list[Bound]] = {}
        self.begun: set[int] = set()

    async def act(self, what: object, how: object) -> None:
        if isinstance(what, int):
            assert isinstance(how, WorkerState)
            self.desk.change(what, how)
        elif what == "turn":
            await asyncio.sleep(0)
        elif what in ("set_aside", "take_back"):
            getattr(self.desk, str(what))(how)
        elif what == "arrive":
            self.arrive(how)
        elif self.tickets:
            assert isinstance(how, int)
            self.touch(str(what), self.tickets[how % len(self.tickets)], how // 10)
        self.look()

    def arrive(self, wanted: object) -> None:
        assert wanted is None or isinstance(wanted, int)
        try:
            self.tickets.append(self.desk.arrive(7, wanted))
        except Refused:
            away = wanted is not None and self.desk.workers[wanted].state is not SERVING
            # More wait where a worker was lost that had not begun what it had.
            assert away or self.desk.held >= 5

    def touch(self, what: str, ticket: Ticket, age: int) -> None:
        # A task acts by a binding that it knows, which may be over: mostly the last one.
        bounds = self.bounds.setdefault(ticket.number, [Bound(0)])
        bound = bounds[-1 - (age % len(bounds))]
        match what:
            case "begin":
                current = ticket.state is bound
                assert self.desk.begin(ticket, bound) == current
                if current:
                    assert ticket.number not in self.begun, "passed on twice"
                    self.begun.add(ticket.number)
            case "made":
                self.desk.made(ticket, ticket.told + 3)
            case "finish":
                self.desk.finish(ticket, bound, 9)
            case "leave":
                self.desk.leave(ticket)
            case "again":
                with suppress(Refused):  # by a client that wants one worker, which does not serve
                    self.desk.again(ticket, bound)

    def look(self) -> None:
        """Invariants."""
        assert self.desk.errors == 0
        known = self.desk.tickets
        assert self.desk.held == sum(isinstance(one.state, Held) for one in known)
        assert all(one.state is not GONE for one in known)
        for number, view in enumerate(self.desk.workers):
            mine = [t for t in known if isinstance(t.state, Bound | Running)
                    if t.state.worker == number]  # fmt: skip
            assert sorted(view.tickets) == sorted(one.number for one in mine)
            assert view.load == sum(one.size + one.told for one in mine)
            assert len(mine) <= SLOTS
        for ticket in self.tickets:
            bounds = self.bounds.setdefault(ticket.number, [Bound(0)])
            if isinstance(ticket.state, Bound) and ticket.state is not bounds[-1]:
                bounds.append(ticket.state)
            if ticket.number in self.begun and ticket.state is not GONE:
                assert isinstance(ticket.state, Running)


def strict(slots: Sequence[int], rooms: Sequence[int | None]) -> Policy:
    return LateBinding(slots, rooms)


FACTORIES = (strict, *(factory_of(name, {}) for name in ("fit", "br0", "jsq_load", "round_robin")))


@pytest.mark.slow
@pytest.mark.parametrize("factory", FACTORIES)
@given(acts=st.lists(ACTS, max_size=80))
def test_policy_protocol_holds_for_any_event_order(
    factory: PolicyFactory, acts: list[tuple[object, object]]
) -> None:
    async def work() -> None:
        play = Play(factory([SLOTS] * WORKERS, [None] * WORKERS))
        for what, how in acts:
            await play.act(what, how)
        for ticket in play.tickets:
            play.desk.leave(ticket)
        await asyncio.sleep(0)
        play.look()
        assert play.desk.held == 0
        assert [view.load for view in play.desk.workers] == [0] * WORKERS

    run(work())


class Told(LateBinding):
    """Notes how often it is told of tokens."""

    def __init__(self) -> None:
        super().__init__([8])
        self.turns: list[tuple[dict[RequestId, int], list[RequestId]]] = []

    def on_tokens(self, counts: object, finished: object = ()) -> Decision:
        assert isinstance(counts, dict)
        assert isinstance(finished, list)
        self.turns.append((dict(counts), list(finished)))
        return super().on_tokens(counts, finished)


def test_policy_gets_tokens_of_one_loop_turn_together() -> None:
    async def work() -> None:
        policy = Told()
        desk = Desk(policy, 1, most_held=9)
        tickets = [desk.arrive(5) for _ in range(4)]
        for ticket in tickets:
            assert isinstance(ticket.state, Bound)
            desk.begin(ticket, ticket.state)
            desk.made(ticket, 3)
        desk.finish(tickets[0], Bound(0), 5)
        assert policy.turns == []
        await asyncio.sleep(0)
        assert policy.turns == [({0: 5, 1: 3, 2: 3, 3: 3}, [0])]

    run(work())


class Broken(LateBinding):
    """Binds what does not exist, and raises at tokens."""

    def on_arrival(self, request: Request) -> Decision:
        super().on_arrival(request)
        return Decision((Assignment(99, 0), Assignment(request.id, 7)))

    def on_abort(self, request: RequestId) -> Decision:
        raise ValueError(request)


def test_policy_errors_are_counted_and_request_can_leave() -> None:
    async def work() -> None:
        desk = Desk(Broken([1]), 1, most_held=9)
        ticket = desk.arrive(5)
        assert isinstance(ticket.state, Held)
        assert desk.errors == 2
        desk.leave(ticket)
        assert (desk.errors, desk.tickets) == (3, ())

    run(work())


def test_request_rejected_by_policy_is_not_kept() -> None:
    class Refusing(LateBinding):
        def on_arrival(self, request: Request) -> Decision:
            raise ValueError(request)

    async def work() -> None:
        desk = Desk(Refusing([1]), 1, most_held=9)
        with pytest.raises(ValueError, match="Request"):
            desk.arrive(5)
        assert (desk.held, desk.tickets) == (0, ())

    run(work())


def test_retry_goes_to_least_loaded_other_worker() -> None:
    async def work() -> None:
        desk = Desk(LateBinding([4, 4, 4]), 3, most_held=9)
        tickets = [desk.arrive(5) for _ in range(4)]
        last = tickets[-1].state
        assert isinstance(last, Bound)
        assert last.worker == 0
        desk.again(tickets[-1], last)
        assert isinstance(tickets[-1].state, Bound)
        assert tickets[-1].state.worker == 1
        assert balance_of(desk.workers).imbalance == 3 * 10 - 20

    run(work())


@pytest.mark.parametrize("name", ["fit", "brh", "jsq_load", "fast_phi"])
def test_policy_frees_slots_after_largest_token_counts(name: str) -> None:
    async def work() -> None:
        policy = factory_of(name, {})([SLOTS], [None])
        assert isinstance(policy, RequestRouter)
        desk = Desk(policy, 1, most_held=5)
        large, small = desk.arrive(events.MOST_TOKENS), desk.arrive(7)
        for ticket, tokens in ((large, events.MOST_TOKENS), (small, 3)):
            assert isinstance(ticket.state, Bound)
            desk.finish(ticket, ticket.state, tokens)
        await asyncio.sleep(0)
        assert (desk.errors, policy.loads, policy.counts, policy.pooled) == (0, [0], [0], 0)

    run(work())
