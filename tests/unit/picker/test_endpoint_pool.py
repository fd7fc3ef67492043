"""Endpoints over worker numbers: whatever comes and goes, the books stay right."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from helpers.harnesses.picker_setup import endpoint_at, pool_of, run, set_endpoints
from hypothesis import example, given
from hypothesis import strategies as st

from equipoise.balancer.requests.dispatcher import BoundToWorker, Running
from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.outcomes import RequestRefused
from equipoise.serve.picker.endpoint_pool import SETTLE_SECONDS, EndpointPool
from equipoise.serve.picker.endpoint_watch import GeneratedTokens
from equipoise.serve.picker.settings import TokenSource
from equipoise.serve.proxy_request import ProxyRequest

ADDRESSES = tuple(f"10.0.0.{n}:8000" for n in range(4))
PORTS = st.integers(0, len(ADDRESSES) - 1)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("list"), st.lists(st.tuples(PORTS, st.integers(1, 3)), max_size=4)),
        st.tuples(st.just("health"), st.tuples(PORTS, st.sampled_from(WorkerState))),
        st.tuples(st.just("submit"), st.none() | st.sets(PORTS)),
        st.tuples(st.sampled_from(["start", "finish", "abort"]), st.tuples(st.integers(), PORTS)),
        st.tuples(st.just("turn"), st.none()),
    ),
    max_size=40,
)


class Driver:
    """A pool, and the requests that were submitted to it."""

    def __init__(self) -> None:
        self.pool = pool_of()
        self.requests: list[ProxyRequest] = []
        self.most_endpoints = 0

    async def apply(self, event: str, how: Any) -> None:
        pool = self.pool
        match event:
            case "list":
                listed = {ADDRESSES[n]: slots for n, slots in how}
                pool.set_endpoints([endpoint_at(one, slots=listed[one]) for one in listed])
            case "health":
                for one in pool.endpoints:
                    if one.address == ADDRESSES[how[0]]:
                        pool.dispatcher.set_health(one.number, how[1])
            case "submit":
                subset = None if how is None else frozenset(ADDRESSES[n] for n in how)
                with suppress(RequestRefused):
                    self.requests.append(pool.submit(7, subset))
                    self.check_subset(self.requests[-1], subset)
            case "turn":
                await asyncio.sleep(0)
            case _ if self.requests:
                self.act(event, how[0] % len(self.requests), ADDRESSES[how[1]])
        self.most_endpoints = max(self.most_endpoints, len(pool.endpoints))
        self.check()

    def act(self, event: str, number: int, address: str) -> None:
        pool, state = self.pool, self.requests[number]
        match event, state.status:
            case "start", BoundToWorker():
                self.requests[number] = pool.start_answer(state, address)
            case "finish", _:
                pool.finish(state, 3)
            case "abort", _:
                pool.abort(state)

    def check_subset(self, state: ProxyRequest, subset: frozenset[str] | None) -> None:
        if subset is not None and isinstance(state.status, BoundToWorker):
            assert self.pool.endpoint(state.status).address in subset

    def check(self) -> None:
        pool = self.pool
        assert pool.dispatcher.policy_errors == 0
        numbers = {one.number for one in pool.endpoints}
        for number, view in enumerate(pool.dispatcher.workers):
            assert not view.requests or number in numbers
            assert number in numbers or view.state is WorkerState.LOST
        assert pool.serving == sum(
            pool.view(one).state is WorkerState.SERVING for one in pool.endpoints
        )

    async def end(self) -> None:
        """End every request; then each slot takes one."""
        pool = self.pool
        for state in self.requests:
            pool.abort(state)
        pool.set_endpoints([endpoint_at(one) for one in ADDRESSES])
        await asyncio.sleep(0)
        assert not pool.dispatcher.requests
        assert not pool.dispatcher.queued
        assert all(not view.requests and not view.load for view in pool.dispatcher.workers)
        # Numbers come again: as many as there ever were endpoints at a time.
        assert len(pool.dispatcher.workers) <= max(1, self.most_endpoints, len(ADDRESSES))
        set_endpoints(pool, [endpoint_at(one, slots=2) for one in ADDRESSES])
        states = [pool.submit(7) for _ in range(2 * len(ADDRESSES))]
        assert all(isinstance(one.status, BoundToWorker) for one in states)
        pool.close()


@given(events=EVENTS)
def test_books_stay_right_whatever_comes_and_goes(events: Sequence[tuple[str, Any]]) -> None:
    async def work() -> None:
        driver = Driver()
        for event, how in events:
            await driver.apply(event, how)
        await driver.end()

    run(work())


def test_endpoint_that_left_is_removed_after_the_drain_timeout() -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES[:1], drain=0.05)
        state = pool.submit(7)
        state = pool.start_answer(state, ADDRESSES[0])
        pool.set_endpoints([])
        assert [pool.is_leaving(one) for one in pool.endpoints] == [True]
        await asyncio.sleep(0.2)
        assert pool.endpoints == ()
        pool.finish(state, 3)  # its stream ends later, and finds nothing to end
        assert not pool.dispatcher.requests

    run(work())


def test_endpoint_that_comes_back_in_time_gets_requests_again() -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES[:1])
        state = pool.submit(7)
        pool.set_endpoints([])
        with pytest.raises(RequestRefused, match="no endpoint is ready"):
            pool.submit(7)
        pool.set_endpoints([endpoint_at(ADDRESSES[0])])
        assert isinstance(pool.submit(7).status, BoundToWorker)
        assert isinstance(state.status, BoundToWorker)
        pool.close()

    run(work())


def test_endpoint_stays_whose_headers_are_written_otherwise() -> None:
    async def work() -> None:
        pool = pool_of()
        set_endpoints(pool, [endpoint_at(ADDRESSES[0], headers={"X-A": "1", "X-B": "2"})])
        state = pool.submit(7)
        pool.set_endpoints([endpoint_at(ADDRESSES[0], headers={"x-b": "2", "x-a": "1"})])
        [endpoint] = pool.endpoints
        assert not pool.is_leaving(endpoint)
        assert state.worker == endpoint.number
        assert pool.serving == 1
        pool.close()

    run(work())


def test_fallback_needs_the_same_headers_and_another_address() -> None:
    async def work() -> None:
        pool = pool_of()
        first, second = ({"x-data-parallel-rank": str(rank)} for rank in (0, 1))
        set_endpoints(
            pool,
            [
                endpoint_at(ADDRESSES[0], headers=first),
                endpoint_at(ADDRESSES[0], headers=second),
                endpoint_at(ADDRESSES[1], headers=second),
            ],
        )
        addresses = [pool.addresses(one, None) for one in pool.endpoints]
        assert addresses == [
            (ADDRESSES[0],),
            (ADDRESSES[0], ADDRESSES[1]),
            (ADDRESSES[1], ADDRESSES[0]),
        ]

    run(work())


KV_TOKENS = st.none() | st.integers(1, 200)


@given(
    kv_tokens=st.lists(KV_TOKENS, min_size=4, max_size=4),
    serving=st.sets(PORTS, min_size=1),
    subset=st.none() | st.sets(PORTS, min_size=1),
    size=st.integers(1, 300),
)
@example(kv_tokens=[10, 200, 200, 200], serving={0, 1, 2}, subset={0, 1}, size=150)
def test_request_of_any_size_is_bound_at_once_to_an_empty_endpoint(
    kv_tokens: list[int | None], serving: set[int], subset: set[int] | None, size: int
) -> None:
    async def work() -> None:
        pool = pool_of()
        endpoints = zip(ADDRESSES, kv_tokens, strict=True)
        pool.set_endpoints([endpoint_at(one, kv_tokens=tokens) for one, tokens in endpoints])
        for one in pool.endpoints:
            serves = ADDRESSES.index(one.address) in serving
            state = WorkerState.SERVING if serves else WorkerState.LOST
            pool.dispatcher.set_health(one.number, state)
        allowed = serving if subset is None else serving & subset
        if not allowed:
            return
        addresses = None if subset is None else frozenset(ADDRESSES[n] for n in subset)
        request = pool.submit(size, addresses)
        assert isinstance(request.status, BoundToWorker)
        place = ADDRESSES.index(pool.endpoint(request.status).address)
        # As large as one of them can hold, and no larger than where it is.
        room = [kv_tokens[n] for n in allowed]
        assert request.size == (size if None in room else min(size, max(filter(None, room))))
        assert place in allowed
        assert request.size <= (kv_tokens[place] or size)
        pool.close()

    run(work())


def test_answer_of_a_smaller_endpoint_is_counted_there() -> None:
    async def work() -> None:
        pool = pool_of()
        small, large = (endpoint_at(ADDRESSES[n], kv_tokens=(n + 1) * 100) for n in range(2))
        set_endpoints(pool, [small, large])
        state = pool.start_answer(pool.submit(5_000), ADDRESSES[0])
        assert (state.size, type(state.status)) == (100, Running)
        pool.close()

    run(work())


def test_ends_of_a_step_are_told_as_one_event() -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES[:2], tokens=TokenSource.METRICS)
        states = [pool.start_answer(one, address_of(pool, one)) for one in fill(pool, 4)]
        waiting = [pool.submit(size) for size in (1, 100)]
        for state in states[:2]:
            pool.finish(state, 0)
            assert isinstance(state.status, Running)
        await asyncio.sleep(SETTLE_SECONDS * 10)
        # Both slots were free when it was decided: neither request waits for the other.
        assert all(isinstance(one.status, BoundToWorker) for one in waiting)

    run(work())


def fill(pool: EndpointPool, count: int) -> list[ProxyRequest]:
    return [pool.submit(7) for _ in range(count)]


def address_of(pool: EndpointPool, state: ProxyRequest) -> str:
    assert isinstance(state.status, BoundToWorker)
    return pool.endpoint(state.status).address


@pytest.mark.parametrize(
    ("readings", "made"),
    [
        ([(100, 0)], 0),  # nobody knows when these were made
        ([(100, 0), (109, 0)], 3),
        ([(100, 0), (104, 0), (108, 0), (109, 0)], 3),  # what is left of a division counts later
        ([(100, 0), (112, 6)], 2),  # others have requests there too
        ([(100, 0), (5, 0), (10, 0)], 1),  # it was started again
        ([(100, 0), (100, 0)], 0),
    ],
)
def test_tokens_of_a_counter_are_divided(readings: list[tuple[float, int]], made: int) -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES[:1], slots=3, tokens=TokenSource.METRICS)
        states = [pool.start_answer(one, ADDRESSES[0]) for one in fill(pool, 3)]
        counter = GeneratedTokens(pool)
        for generated, running in readings:
            counter.observe(0, generated, running)
        # One each, by which the policy knows that it began.
        assert [one.tokens for one in states] == [1 + made] * 3

    run(work())


def test_counter_of_a_worker_that_runs_nothing_is_remembered() -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES[:1], tokens=TokenSource.METRICS)
        counter = GeneratedTokens(pool)
        counter.observe(0, 100, 0)
        counter.observe(0, 900, 0)
        state = pool.start_answer(pool.submit(7), ADDRESSES[0])
        counter.observe(0, 904, 1)
        assert state.tokens == 1 + 4
        counter.forget(0)
        counter.observe(0, 5_000, 1)
        assert state.tokens == 1 + 4

    run(work())
