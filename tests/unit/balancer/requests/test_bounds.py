"""Nothing beats the bounds, and each is met where it should be."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from helpers.strategies.simulation_comparison import clusters, scenarios, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.requests.bounds import best_assignment, makespan_bound
from equipoise.balancer.requests.cluster import Cluster, Prefill, StepTime
from equipoise.balancer.requests.policy_settings import POLICIES
from equipoise.balancer.requests.simulation import SaturatedArrivals, Scenario, simulate
from equipoise.balancer.requests.workload import Workload
from equipoise.hal.errors import UsageError

BY_STEP = StepTime(fixed=1.0, per_token=0.5)
TINY = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4)


def workload(*requests: tuple[int, int]) -> Workload:
    prompts, outputs = zip(*requests, strict=True)
    return Workload("tiny", None, np.array(prompts), np.array(outputs))


@pytest.mark.slow
@settings(max_examples=150)
@given(workloads(), scenarios(), st.sampled_from(sorted(POLICIES)))
def test_work_bound_holds_for_every_policy(
    any_workload: Workload, scenario: Scenario, name: str
) -> None:
    noiseless_cluster = replace(scenario.cluster, step=replace(scenario.cluster.step, noise=0.0))
    policy = replace(scenario.policy, name=name)
    steps = simulate(
        any_workload,
        replace(scenario, cluster=noiseless_cluster, policy=policy, queue_timeout=None),
    )
    if steps.requests.failed.any():
        return
    end = float(steps.requests.end.max())
    assert end >= makespan_bound(any_workload, noiseless_cluster) * (1 - 1e-12)


def test_work_bound_is_met_by_equal_requests_with_enough_slots() -> None:
    equal_requests = workload(*[(7, 5)] * 6)
    cluster = Cluster(workers=3, slots=2, step=BY_STEP)
    end = simulate(equal_requests, Scenario(cluster=cluster)).requests.end.max()
    assert (
        end == makespan_bound(equal_requests, cluster) == 5 * 1.0 + 0.5 * 2 * (7 + 8 + 9 + 10 + 11)
    )


def test_work_bound_counts_steps_required_by_slots() -> None:
    one_slot = Cluster(workers=1, slots=1, step=StepTime(fixed=1.0, per_token=0.0))
    assert makespan_bound(workload((3, 2), (4, 5)), one_slot) == 7


def test_work_bound_omits_prompt_in_the_step_that_computes_it() -> None:
    cluster = Cluster(workers=1, slots=1, step=BY_STEP, prefill=Prefill(chunk=100))
    single_request = workload((7, 3))
    assert makespan_bound(single_request, cluster) == 3 * 1.0 + 0.5 * (8 + 9)
    assert simulate(single_request, Scenario(cluster=cluster)).requests.end.max() == makespan_bound(
        single_request, cluster
    )
    bounded_cluster = replace(cluster, kv_tokens=100)
    assert makespan_bound(single_request, bounded_cluster) == 3


def test_work_bound_refuses_noisy_steps() -> None:
    noisy_cluster = Cluster(step=StepTime(noise=0.1))
    with pytest.raises(UsageError, match="noisy"):
        makespan_bound(workload((1, 1)), noisy_cluster)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=12)
@given(requests=TINY, workers=st.integers(2, 3), slots=st.integers(1, 2))
def test_best_assignment_bounds_every_policy(
    name: str, requests: list[tuple[int, int]], workers: int, slots: int
) -> None:
    cluster = Cluster(workers=workers, slots=slots, step=BY_STEP)
    scenario = Scenario(cluster=cluster, arrivals=SaturatedArrivals(len(requests)))
    policy_scenario = replace(scenario, policy=replace(scenario.policy, name=name))
    steps = simulate(workload(*requests), policy_scenario).steps
    idle_load = (workers * steps.largest - steps.sum).sum()
    assert idle_load >= best_assignment(workload(*requests), workers, slots).imbalance


@settings(max_examples=30)
@given(TINY, st.integers(2, 3), st.integers(1, 3), st.integers(0, 2))
def test_best_assignment_equals_exhaustive_search(
    requests: list[tuple[int, int]], workers: int, slots: int, latest: int
) -> None:
    places = list(product(range(workers), range(latest + 1)))
    costs = [
        cost(requests, places_chosen, workers, slots)
        for places_chosen in product(places, repeat=len(requests))
    ]
    possible_costs = [candidate_cost for candidate_cost in costs if candidate_cost is not None]
    if not possible_costs:
        with pytest.raises(UsageError, match="do not fit"):
            best_assignment(workload(*requests), workers, slots, latest)
        return
    best = best_assignment(workload(*requests), workers, slots, latest)
    places_chosen = tuple(zip(best.workers, best.starts, strict=True))
    assert best.imbalance == min(possible_costs) == cost(requests, places_chosen, workers, slots)


def cost(
    requests: list[tuple[int, int]], places: tuple[tuple[int, int], ...], workers: int, slots: int
) -> int | None:
    """Sum of G * max - sum, by the definition; None where a worker has too many at once."""
    total = 0
    for step in range(12):
        loads, counts = [0] * workers, [0] * workers
        for (prompt, output), (worker, start) in zip(requests, places, strict=True):
            if start <= step < start + output:
                loads[worker] += prompt + step - start
                counts[worker] += 1
        if max(counts) > slots:
            return None
        total += workers * max(loads) - sum(loads)
    return total


def test_best_assignment_of_eight_requests() -> None:
    eight = workload(*[(size, 2) for size in (8, 7, 6, 5, 4, 3, 2, 1)])
    assert best_assignment(eight, 2, 8, latest=0).imbalance == 0
    # Sums of 12 each, of three, two and three requests, so that they do not grow alike.
    assert best_assignment(eight, 3, 8, latest=0).imbalance == 1
    with pytest.raises(UsageError, match="too many"):
        best_assignment(workload(*[(1, 1)] * 9), 2, 8)


@given(clusters(plain=True), workloads(most=4))
def test_one_worker_is_always_balanced(cluster: Cluster, any_workload: Workload) -> None:
    steps = simulate(any_workload, Scenario(cluster=replace(cluster, workers=1))).steps
    assert np.array_equal(steps.largest, steps.sum)
    assert best_assignment(any_workload, 1, any_workload.count, latest=0).imbalance == 0
