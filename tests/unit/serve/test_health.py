"""Whether a worker is well: nothing is concluded from one moment, but by the settings."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.health import HealthCheckResult, WorkerHealth, initial_health
from equipoise.serve.settings import HealthSettings

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
    history = states(checks, settings)
    for n in range(1, len(checks)):
        before, after = history[n - 1].state, history[n].state
        if before is after:
            continue
        recent = checks[: n + 1]
        match after:
            case WorkerState.SERVING:
                assert recent[-serving_after:] == [HealthCheckResult.HEALTHY] * serving_after
            case WorkerState.DRAINING:
                assert before is WorkerState.SERVING
                assert HealthCheckResult.HEALTHY not in recent[-draining_after:]
            case WorkerState.LOST:
                assert recent[-lost_after:] == [HealthCheckResult.NO_ANSWER] * lost_after


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
        states([*checks, *[HealthCheckResult.NO_ANSWER] * 4], settings)[-1].state
        is WorkerState.LOST
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
    assert initial_health(HealthCheckResult.NO_ANSWER).uncertain is False
    history = states(
        [
            HealthCheckResult.HEALTHY,
            HealthCheckResult.NO_ANSWER,
            HealthCheckResult.NO_ANSWER,
            HealthCheckResult.NO_ANSWER,
            HealthCheckResult.HEALTHY,
        ],
        settings,
    )
    assert [one.uncertain for one in history] == [False, True, True, False, True]
