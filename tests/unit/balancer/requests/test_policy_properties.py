"""What holds of policies by arithmetic: section by section of the papers, and for any state."""

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from helpers.harnesses.router_states import arrivals, full, loaded, resize
from helpers.strategies.simulation_comparison import clusters, same, scenarios, workloads
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from equipoise import _native
from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.policy_settings import POLICIES, RoutingPolicySettings, WhenFull
from equipoise.balancer.requests.simulation import Scenario, TimedArrivals, simulate
from equipoise.balancer.requests.workload import Workload

pytestmark = pytest.mark.slow

LOADS = st.lists(st.integers(1, 1000), min_size=1, max_size=6)
DISTINCT = st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True)
SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=6)
BY_LOAD = ("jsq_load", "br0", "brh", "fit")
"""Whose decisions are made of sizes, loads and slots alone."""


def imbalance_drop(loads: list[int], worker: int, size: int) -> int:
    """The drop of the imbalance G * max - sum when `size` tokens join a worker."""
    after = [load + size * (w == worker) for w, load in enumerate(loads)]
    imbalance = [len(loads) * max(them) - sum(them) for them in (loads, after)]
    return imbalance[0] - imbalance[1]


@given(LOADS, SIZES, st.data())
def test_br0_picks_request_with_largest_imbalance_drop(
    loads: list[int], sizes: list[int], data: st.DataObject
) -> None:
    free_worker = data.draw(st.integers(0, len(loads) - 1))
    router = full(RoutingPolicySettings(name="br0", greedy_slots=0), loads, sizes)
    ((name, worker),) = resize(router, free_worker, 2)
    drops = [imbalance_drop(loads, free_worker, size) for size in sizes]
    assert (worker, name) == (free_worker, drops.index(max(drops)))


@given(LOADS, st.integers(2, 5), SIZES, st.data())
def test_br0_picks_subset_with_largest_imbalance_drop(
    loads: list[int], slots: int, sizes: list[int], data: st.DataObject
) -> None:
    free_worker = data.draw(st.integers(0, len(loads) - 1))
    policy = RoutingPolicySettings(name="br0", greedy_slots=slots, subset=4)
    assignments = resize(full(policy, loads, sizes[:4]), free_worker, 1 + slots)
    best = max(imbalance_drop(loads, free_worker, total) for total in subset_sums(sizes[:4], slots))
    totals_of_first = [total_of(assignments[: k + 1], sizes) for k in range(len(assignments))]
    assert best <= 0 or best in [
        imbalance_drop(loads, free_worker, total) for total in totals_of_first
    ]


def subset_sums(sizes: list[int], most: int) -> set[int]:
    """Sums of all subsets of at most `most` sizes."""
    masks = range(1, 1 << len(sizes))
    subsets = [[s for i, s in enumerate(sizes) if mask >> i & 1] for mask in masks]
    return {sum(subset) for subset in subsets if len(subset) <= most}


def total_of(assignments: list[tuple[object, int]], sizes: list[int]) -> int:
    return sum(size for name, size in enumerate(sizes) if name in [b[0] for b in assignments])


@given(st.lists(st.integers(1, 150), min_size=2, max_size=6), st.integers(1, 4))
def test_fit_fills_free_slots_of_a_decision_with_mean_sizes(loads: list[int], free: int) -> None:
    workers = len(loads)
    settings = RoutingPolicySettings(slack=100.0)
    router = _native.Router(settings.native(), workers, free + 1, 1 << 40)
    router.count_steps_by_caller()
    for worker, load in enumerate(loads):
        router.arrive(load, -1, [], worker)
    assert len(router.dispatch()) == workers
    # So many of every size that each worker gets what it needs, but for half of a step of sizes.
    sizes = [*range(10, 401, 10)] * 25
    size_of = {router.arrive(size, -1, [], -1): size for size in sizes}
    bound = [size_of[request] for request, _ in router.dispatch()]
    assert len(bound) == workers * free
    assert sum(bound) == pytest.approx(len(bound) * sum(sizes) / len(sizes), abs=10 * workers)


@example([58, 86], [1, 1, 46, 72], 0)
@given(LOADS, SIZES, st.integers(0, 59))
def test_fit_counts_overshoot_for_every_worker_at_the_fullest(
    loads: list[int], sizes: list[int], drawn: int
) -> None:
    worker, mean = drawn % len(loads), sum(sizes) / len(sizes)
    ends = [load + mean * (w == worker) for w, load in enumerate(loads)]
    need = sum(ends) / len(ends) - loads[worker]
    overshoot = len(loads) if ends[worker] == max(ends) else 1
    costs = [overshoot * (size - need) if size > need else need - size for size in sizes]
    router = full(RoutingPolicySettings(slack=100.0, overshoot=0.0), loads, sizes)
    ((name, bound_to),) = resize(router, worker, 2)
    assert bound_to == worker
    assert costs[cast("int", name)] == pytest.approx(min(costs))


@given(LOADS, st.integers(1, 1000))
def test_jsq_load_worker_has_largest_drop_for_one_request(loads: list[int], size: int) -> None:
    workers = range(len(loads))
    best = max(workers, key=lambda w: (imbalance_drop(loads, w, size), -loads[w], -w))
    assert arrivals(loaded(RoutingPolicySettings(name="jsq_load"), loads), [size]) == [best]


@given(LOADS, st.integers(1, 1000))
def test_jsq_load_minimizes_variance_of_loads(loads: list[int], size: int) -> None:
    (worker,) = arrivals(loaded(RoutingPolicySettings(name="jsq_load"), loads), [size])

    def variance(of: int) -> int:
        after = [load + size * (w == of) for w, load in enumerate(loads)]
        return len(after) * sum(load * load for load in after) - sum(after) ** 2

    assert variance(worker) == min(map(variance, range(len(loads))))


@settings(max_examples=60)
@given(workloads(), scenarios())
def test_brh_with_zero_horizon_equals_br0_bit_for_bit(
    workload: Workload, scenario: Scenario
) -> None:
    outcomes = [
        simulate(workload, replace(scenario, policy=replace(scenario.policy, name=name, horizon=0)))
        for name in ("br0", "brh")
    ]
    assert same(*outcomes)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=10)
@given(workload=workloads(), scenario=scenarios())
def test_simulation_is_deterministic_per_seed(
    name: str, workload: Workload, scenario: Scenario
) -> None:
    policy_scenario = replace(scenario, policy=replace(scenario.policy, name=name))
    assert same(simulate(workload, policy_scenario), simulate(workload, policy_scenario))


@pytest.mark.parametrize("name", BY_LOAD)
@given(loads=DISTINCT, sizes=SIZES, data=st.data())
def test_policy_decisions_ignore_worker_numbering(
    name: str, loads: list[int], sizes: list[int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(loads))))
    router = loaded(RoutingPolicySettings(name=name), loads)
    workers = arrivals(router, sizes)
    current_loads = list(loads)
    for worker, size in zip(workers, sizes, strict=True):
        current_loads[worker] += size
        assume(len(set(current_loads)) == len(current_loads))
    renumbered_router = loaded(RoutingPolicySettings(name=name), [loads[w] for w in order])
    assert arrivals(renumbered_router, sizes) == [order.index(worker) for worker in workers]


@pytest.mark.parametrize("name", BY_LOAD)
@given(loads=LOADS, sizes=SIZES, factor=st.sampled_from((2, 8, 1024)), data=st.data())
def test_policy_decisions_ignore_unit_of_size(
    name: str, loads: list[int], sizes: list[int], factor: int, data: st.DataObject
) -> None:
    policy = RoutingPolicySettings(name=name, when_full=WhenFull.HOLD, wait_bonus=0.0, horizon=0)
    free_worker = data.draw(st.integers(0, len(loads) - 1))
    slots = data.draw(st.integers(1, 9))
    assignments = resize(full(policy, loads, sizes), free_worker, slots)
    scaled_router = full(
        policy, [factor * load for load in loads], [factor * size for size in sizes]
    )
    assert resize(scaled_router, free_worker, slots) == assignments


@settings(max_examples=60)
@given(workloads(), scenarios(), clusters(plain=True))
def test_simulation_loads_match_active_requests_within_slots(
    workload: Workload, scenario: Scenario, cluster: Cluster
) -> None:
    traced_scenario = replace(scenario, cluster=cluster, trajectory=1 << 20)
    outcome = simulate(workload, traced_scenario)
    loads = np.zeros_like(outcome.steps.loads)
    counts = np.zeros_like(loads)
    for job in np.flatnonzero(outcome.requests.failed == 0):
        steps = outcome.requests.admitted_step[job] + np.arange(workload.outputs[job])
        loads[steps, outcome.requests.worker[job]] += workload.prompts[job] + np.arange(steps.size)
        counts[steps, outcome.requests.worker[job]] += 1
    assert np.array_equal(outcome.steps.loads, loads)
    assert counts.max(initial=0) <= traced_scenario.cluster.slots


@settings(max_examples=60)
@given(workloads(), scenarios())
def test_simulation_serves_every_request_and_token_once(
    workload: Workload, scenario: Scenario
) -> None:
    outcome = simulate(workload, scenario)
    is_served = outcome.requests.failed == 0
    token_count = int(outcome.steps.tokens.sum())
    assert (outcome.requests.end[is_served] >= outcome.requests.first[is_served]).all()
    assert (outcome.requests.first[is_served] >= outcome.requests.admitted[is_served]).all()
    assert (outcome.requests.admitted[is_served] >= outcome.requests.arrival[is_served]).all()
    assert workload.outputs[is_served].sum() <= token_count <= workload.outputs.sum()


@settings(max_examples=60)
@given(workloads(), scenarios())
def test_simulation_throughput_is_at_most_that_of_perfect_balance(
    workload: Workload, scenario: Scenario
) -> None:
    steps = simulate(workload, replace(scenario, arrivals=TimedArrivals())).steps
    assert (steps.ideal_seconds <= steps.seconds * (1 + 1e-12)).all()
