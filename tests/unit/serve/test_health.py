"""Whether a worker is well: nothing is concluded from one moment, but by the settings."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.health import HealthCheckResult, WorkerHealth, initial_health
from equipoise.serve.settings import HealthSettings

SEEN = st.lists(st.sampled_from(HealthCheckResult), min_size=1, max_size=40)
COUNTS = st.integers(1, 4)


def states(seen: list[HealthCheckResult], settings: HealthSettings) -> list[WorkerHealth]:
    found = [initial_health(seen[0])]
    for one in seen[1:]:
        found.append(found[-1].after(one, settings))
    return found


@given(seen=SEEN, draining=COUNTS, lost=COUNTS, serving=COUNTS)
def test_health_state_changes_only_after_configured_counts(
    seen: list[HealthCheckResult], draining: int, lost: int, serving: int
) -> None:
    settings = HealthSettings(draining_after=draining, lost_after=lost, serving_after=serving)
    found = states(seen, settings)
    for n in range(1, len(seen)):
        before, after = found[n - 1].state, found[n].state
        if before is after:
            continue
        recent = seen[: n + 1]
        match after:
            case WorkerState.SERVING:
                assert recent[-serving:] == [HealthCheckResult.HEALTHY] * serving
            case WorkerState.DRAINING:
                assert before is WorkerState.SERVING
                assert HealthCheckResult.HEALTHY not in recent[-draining:]
            case WorkerState.LOST:
                assert recent[-lost:] == [HealthCheckResult.NO_ANSWER] * lost


@given(seen=SEEN)
def test_health_ends_serving_when_well_and_lost_when_silent(
    seen: list[HealthCheckResult],
) -> None:
    settings = HealthSettings()
    assert (
        states([*seen, *[HealthCheckResult.HEALTHY] * 4], settings)[-1].state is WorkerState.SERVING
    )
    assert (
        states([*seen, *[HealthCheckResult.NO_ANSWER] * 4], settings)[-1].state is WorkerState.LOST
    )
    unwell = states([*seen, *[HealthCheckResult.UNHEALTHY] * 4], settings)[-1].state
    assert unwell is not WorkerState.SERVING


def test_health_unwell_worker_stays_draining() -> None:
    found = states(
        [HealthCheckResult.HEALTHY, *[HealthCheckResult.UNHEALTHY] * 99], HealthSettings()
    )
    assert {one.state for one in found[1:]} == {WorkerState.DRAINING}


def test_health_is_doubtful_between_states() -> None:
    settings = HealthSettings()
    assert initial_health(HealthCheckResult.HEALTHY).uncertain is False
    assert initial_health(HealthCheckResult.NO_ANSWER).uncertain is False
    found = states(
        [
            HealthCheckResult.HEALTHY,
            HealthCheckResult.NO_ANSWER,
            HealthCheckResult.NO_ANSWER,
            HealthCheckResult.NO_ANSWER,
            HealthCheckResult.HEALTHY,
        ],
        settings,
    )
    assert [one.uncertain for one in found] == [False, True, True, False, True]
