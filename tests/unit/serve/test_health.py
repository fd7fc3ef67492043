"""Whether a worker is well: nothing is concluded from one moment, but by the settings."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.proxy_setup import ProxySetup, chat_request, proxied, run
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.health import (
    HealthCheckResult,
    LoopStalls,
    WorkerHealth,
    effective_states,
    initial_health,
)
from equipoise.serve.settings import HealthSettings

NO_ANSWER = (HealthCheckResult.SILENT, HealthCheckResult.NO_CONNECTION)
SEEN = st.lists(st.sampled_from(HealthCheckResult), min_size=1, max_size=40)
COUNTS = st.integers(1, 4)


def states(checks: list[HealthCheckResult], settings: HealthSettings) -> list[WorkerHealth]:
    history = [initial_health(checks[0])]
    for one in checks[1:]:
        history.append(history[-1].after(one, settings))
    return history


@given(checks=SEEN, draining_after=COUNTS, lost_after=COUNTS, serving_after=COUNTS)
def test_health_state_changes_only_after_configured_counts(
    checks: list[HealthCheckResult], draining_after: int, lost_after: int, serving_after: int
) -> None:
    settings = HealthSettings(
        draining_after=draining_after, lost_after=lost_after, serving_after=serving_after
    )
    # Where the proxy itself was late nothing is learnt: as if it had not asked.
    checks = [checks[0], *(one for one in checks[1:] if one is not HealthCheckResult.PROXY_LATE)]
    history = states(checks, settings)
    for n in range(1, len(checks)):
        before, after = history[n - 1].state, history[n].state
        if before is after:
            continue
        recent = checks[: n + 1]
        match after:
            case WorkerState.SERVING:
                needed = 1 if history[n - 1].only_late else serving_after
                assert recent[-needed:] == [HealthCheckResult.HEALTHY] * needed
            case WorkerState.DRAINING:
                assert before is WorkerState.SERVING
                assert HealthCheckResult.HEALTHY not in recent[-draining_after:]
            case WorkerState.LOST:
                assert all(one in NO_ANSWER for one in recent[-lost_after:])


@given(checks=SEEN)
def test_health_ends_serving_when_well_and_lost_when_silent(
    checks: list[HealthCheckResult],
) -> None:
    settings = HealthSettings()
    assert (
        states([*checks, *[HealthCheckResult.HEALTHY] * 4], settings)[-1].state
        is WorkerState.SERVING
    )
    assert (
        states([*checks, *[HealthCheckResult.SILENT] * 4], settings)[-1].state is WorkerState.LOST
    )
    unwell = states([*checks, *[HealthCheckResult.UNHEALTHY] * 4], settings)[-1].state
    assert unwell is not WorkerState.SERVING


def test_health_unwell_worker_stays_draining() -> None:
    history = states(
        [HealthCheckResult.HEALTHY, *[HealthCheckResult.UNHEALTHY] * 99], HealthSettings()
    )
    assert {one.state for one in history[1:]} == {WorkerState.DRAINING}


def test_health_is_doubtful_between_states() -> None:
    settings = HealthSettings()
    assert initial_health(HealthCheckResult.HEALTHY).uncertain is False
    assert initial_health(HealthCheckResult.SILENT).uncertain is False
    history = states(
        [
            HealthCheckResult.HEALTHY,
            HealthCheckResult.SILENT,
            HealthCheckResult.SILENT,
            HealthCheckResult.SILENT,
            HealthCheckResult.HEALTHY,
        ],
        settings,
    )
    assert [one.uncertain for one in history] == [False, True, True, False, True]


@given(checks=SEEN)
def test_health_is_unchanged_where_proxy_was_late(checks: list[HealthCheckResult]) -> None:
    before = states(checks, HealthSettings())[-1]
    assert before.after(HealthCheckResult.PROXY_LATE, HealthSettings()) is before


@given(histories=st.lists(SEEN, min_size=1, max_size=8))
def test_late_servers_are_drained_only_where_most_others_answer(
    histories: list[list[HealthCheckResult]],
) -> None:
    beliefs = [states(checks, HealthSettings())[-1] for checks in histories]
    known = [one for one in beliefs if one.state is not WorkerState.LOST]
    late = [one for one in known if one.late]
    for belief, state in zip(beliefs, effective_states(beliefs), strict=True):
        if state is not belief.state:
            assert (belief.state, state) == (WorkerState.DRAINING, WorkerState.SERVING)
            assert belief.only_late
        elif belief.state is WorkerState.DRAINING and belief.only_late:
            assert 2 * len(late) <= len(known)


PATIENT = HealthSettings(interval=0.05, timeout=0.2, lost_after=1000)


@asynccontextmanager
async def late_servers(count: int, late: int) -> AsyncIterator[ProxySetup]:
    """A proxy over servers of which some answer no health check."""
    async with proxied(*(Fake(f"w{n}") for n in range(count)), health=PATIENT) as setup:
        for fake in setup.fakes[:late]:
            fake.health = 0
        yield setup


def states_of(setup: ProxySetup) -> list[WorkerState]:
    return [one.state for one in setup.proxy.dispatcher.workers]


def test_late_server_among_well_ones_is_drained() -> None:
    async def work() -> None:
        async with late_servers(3, late=1) as setup:
            await setup.until(lambda: states_of(setup)[0] is WorkerState.DRAINING)
            assert states_of(setup)[1:] == [WorkerState.SERVING] * 2

    run(work())


def test_proxy_drains_no_server_when_most_are_late() -> None:
    async def work() -> None:
        async with late_servers(3, late=3) as setup:
            board = setup.proxy.health
            await setup.until(lambda: all(one.late > 1 for one in board.beliefs.values()))
            assert states_of(setup) == [WorkerState.SERVING] * 3
            assert (await setup.post(chat_request(1))).status == 200
            setup.fakes[1].health = setup.fakes[2].health = 200
            # Now it is this one only.
            await setup.until(lambda: states_of(setup)[0] is WorkerState.DRAINING)
            assert states_of(setup)[1:] == [WorkerState.SERVING] * 2

    run(work())


def test_proxy_that_stands_still_learns_nothing_of_servers() -> None:
    async def work() -> None:
        async with late_servers(3, late=1) as setup:
            for _ in range(8):
                time.sleep(0.15)  # the loop is what stands still
                await asyncio.sleep(0.06)
            assert states_of(setup) == [WorkerState.SERVING] * 3
            assert await setup.metric("loop_stall_seconds_total") > 0.5
            await setup.until(lambda: states_of(setup)[0] is WorkerState.DRAINING)

    run(work())


def test_loop_stalls_include_stall_that_has_just_ended() -> None:
    async def work() -> None:
        stalls = LoopStalls()
        task = asyncio.create_task(stalls.run())
        await asyncio.sleep(0)
        before = stalls.seconds
        time.sleep(0.3)
        assert stalls.seconds - before >= 0.15
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(work())
