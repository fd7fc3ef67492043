"""What is kept of an outcome for pictures."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.policy_comparison import NamedPolicy
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings
from equipoise.balancer.requests.simulation import Scenario, simulate
from equipoise.balancer.requests.simulation_run import SimulationRun
from equipoise.balancer.requests.workload_generators import generate
from equipoise.report.simulation.load_plots import step_times
from equipoise.report.simulation.result import (
    CLASSES,
    CURVE_POINTS,
    DRAWN_STEPS,
    EXCERPT_STEPS,
    QUANTILES,
    LoadCurves,
    PlotDataCollector,
    StepExcerpt,
    typical_step,
    waits_by_prompt,
)

JSQ = NamedPolicy("jsq", RoutingPolicySettings(name="jsq"))


def run(trajectory: int, seed: int = 0) -> SimulationRun:
    scenario = Scenario(
        cluster=Cluster(workers=3, slots=4), policy=JSQ.policy, trajectory=trajectory
    )
    return simulate(generate("sharegpt", 200, seed), scenario)


@pytest.fixture(scope="module")
def outcome() -> SimulationRun:
    return run(10**6)


def test_load_lines_sample_first_steps_of_outcome(outcome: SimulationRun) -> None:
    lines = LoadCurves.of(outcome)
    assert len(lines.steps) <= 2 * CURVE_POINTS
    assert (lines.steps[0], lines.loads.shape[1]) == (0, 3)
    assert lines.steps[-1] < DRAWN_STEPS
    assert np.array_equal(lines.loads, outcome.steps.loads[lines.steps])
    assert lines.first_measured_step == outcome.window.start


def test_excerpt_has_balance_of_whole_run(outcome: SimulationRun) -> None:
    first = typical_step(outcome)
    excerpt = StepExcerpt.of(outcome)
    assert outcome.window.start <= first <= len(outcome.steps.clock) - EXCERPT_STEPS
    assert excerpt.clock[0] == outcome.steps.clock[first]
    balance = excerpt.loads.mean(axis=1) / excerpt.loads.max(axis=1)
    assert balance.mean() == pytest.approx(outcome.balancedness.mean(), abs=0.02)


@pytest.mark.parametrize("kept_steps", [1, 5, 13, 40])
def test_excerpt_fits_into_kept_steps(kept_steps: int) -> None:
    excerpt = StepExcerpt.of(run(kept_steps))
    count = min(kept_steps, EXCERPT_STEPS)
    assert len(excerpt.loads) == len(excerpt.clock) == len(excerpt.seconds) == count


def test_excerpt_split_puts_barrier_before_step_end(outcome: SimulationRun) -> None:
    times = step_times(StepExcerpt.of(outcome), outcome.cluster)
    assert times.begins[0] == 0
    assert np.allclose(times.reading.max(axis=1), times.barrier)
    assert (times.seconds >= times.barrier - 1e-12).all()
    assert np.allclose(np.diff(times.begins), times.seconds[:-1])


def test_wait_classes_are_ordered_by_size_and_cover_requests(outcome: SimulationRun) -> None:
    sizes, waits = waits_by_prompt(outcome)
    assert len(sizes) == len(waits) == CLASSES
    assert (np.diff(sizes) >= 0).all()
    assert waits.mean() == pytest.approx(outcome.queue_times.mean(), rel=0.1)


def test_outcome_watch_keeps_first_seed_and_averages_balance() -> None:
    watch = PlotDataCollector()
    outcomes = [run(50, seed) for seed in (0, 1)]
    for seed, outcome in enumerate(outcomes):
        watch.keep(JSQ, seed, outcome)
    plot_data = watch.plot_data()["jsq"]
    assert np.array_equal(plot_data.lines.loads, LoadCurves.of(outcomes[0]).loads)
    each = [np.quantile(outcome.balancedness, QUANTILES) for outcome in outcomes]
    assert np.allclose(plot_data.balance, np.mean(each, axis=0))
    assert (np.diff(plot_data.balance) >= 0).all()


def test_outcome_watch_omits_policy_with_all_requests_failed(outcome: SimulationRun) -> None:
    watch, jobs = PlotDataCollector(), outcome.requests
    watch.keep(JSQ, 0, replace(outcome, requests=replace(jobs, failed=np.ones_like(jobs.failed))))
    assert watch.plot_data() == {}
