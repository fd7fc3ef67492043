"""What a simulated cluster does where something is scarce, late, noisy or empty."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.strategies.simulation_comparison import same, scenarios, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.requests.cluster import Cluster, Drafting, Prefill, StepTime
from equipoise.balancer.requests.policy_settings import POLICIES, RoutingPolicySettings, WhenFull
from equipoise.balancer.requests.simulation import (
    SaturatedArrivals,
    Scenario,
    TimedArrivals,
    simulate,
)
from equipoise.balancer.requests.simulation_run import SimulationMetrics, SimulationRun
from equipoise.balancer.requests.workload import Workload
from equipoise.hal.errors import PolicyError, UsageError

SECOND = StepTime(fixed=1.0, per_token=0.0)
"""A step takes a second, whatever is in it."""
JSQ = RoutingPolicySettings(name="jsq")
every_policy = pytest.mark.parametrize("name", POLICIES)


def workload(
    *requests: tuple[int, int],
    times: list[float] | None = None,
    blocks: list[list[int]] | None = None,
) -> Workload:
    prompts, outputs = zip(*requests, strict=True)
    arrivals = None if times is None else np.array(times)
    hashes = None
    if blocks is not None:
        block_hashes = np.array([block for row in blocks for block in row], dtype=np.int64)
        hashes = block_hashes, np.cumsum([0, *map(len, blocks)])
    return Workload("given", arrivals, np.array(prompts), np.array(outputs), hashes, 4)


def one_worker_scenario(**changes: object) -> Scenario:
    """One worker with four slots, a step a second, everything there from the beginning."""
    cluster_options = {"workers": 1, "slots": 4, "step": SECOND} | changes
    cluster = Cluster(**cluster_options)  # type: ignore[arg-type]
    return Scenario(cluster=cluster, policy=JSQ, arrivals=SaturatedArrivals(100), trajectory=100)


def test_request_makes_a_token_per_step_and_grows_its_load() -> None:
    outcome = simulate(workload((5, 3)), one_worker_scenario())
    assert outcome.steps.loads.tolist() == [[5], [6], [7]]
    assert outcome.steps.tokens.tolist() == [1, 1, 1]
    assert (outcome.requests.first[0], outcome.requests.end[0]) == (1.0, 3.0)


@every_policy
def test_one_token_output_ends_in_its_admission_step(name: str) -> None:
    scenario = replace(one_worker_scenario(workers=2), policy=RoutingPolicySettings(name=name))
    outcome = simulate(workload(*[(3, 1)] * 20), scenario)
    steps = outcome.requests.admitted_step
    assert outcome.requests.end.tolist() == (steps + 1.0).tolist()
    assert outcome.steps.active.max() <= 8


@every_policy
def test_one_request_is_served_with_many_workers_and_front_ends(name: str) -> None:
    scenario = Scenario(
        cluster=Cluster(workers=5), policy=RoutingPolicySettings(name=name), front_ends=7
    )
    outcome = simulate(workload((9, 4)), scenario)
    assert outcome.steps.largest.tolist() == [9, 10, 11, 12]
    assert not outcome.requests.failed.any()


def test_full_cache_preempts_last_admitted_request() -> None:
    outcome = simulate(workload((4, 6), (4, 6)), one_worker_scenario(kv_tokens=12))
    assert outcome.requests.preemptions.tolist() == [0, 1]
    # Two make two tokens each, and overflow with the third: the second keeps what it made.
    assert outcome.steps.loads.ravel().tolist()[:4] == [8, 10, 12, 7]
    assert outcome.steps.tokens.sum() == 12
    assert outcome.requests.end.tolist() == [6.0, 9.0]


def test_preempted_requests_keep_their_order() -> None:
    drafting = Drafting(tokens=3, acceptance=1.0)
    three = workload((2, 8), (2, 4), (2, 4))
    outcome = simulate(three, one_worker_scenario(slots=3, kv_tokens=10, drafting=drafting))
    assert outcome.requests.preemptions.tolist() == [0, 0, 0]
    three = workload((2, 8), (2, 7), (2, 7))
    outcome = simulate(three, one_worker_scenario(slots=3, kv_tokens=11, drafting=drafting))
    assert outcome.requests.preemptions.tolist() == [0, 1, 1]
    assert outcome.requests.end.tolist() == [2.0, 3.0, 4.0]
    assert outcome.steps.tokens.sum() == 22


def test_request_larger_than_cache_fails_and_others_continue() -> None:
    outcome = simulate(
        workload((4, 90), (4, 3), (4, 3)), one_worker_scenario(kv_tokens=10, slots=1)
    )
    assert outcome.requests.failed.tolist() == [1, 0, 0]
    assert outcome.requests.end.tolist() == [7.0, 10.0, 13.0]


@every_policy
def test_prompts_larger_than_cache_fail_at_any_backlog(name: str) -> None:
    # They took the places of those that would have come next, and nothing could go on.
    scenario = replace(
        one_worker_scenario(kv_tokens=8),
        policy=RoutingPolicySettings(name=name),
        arrivals=SaturatedArrivals(1),
    )
    outcome = simulate(workload((9, 1), (99, 1), (3, 2), (50, 1)), scenario)
    assert outcome.requests.failed.tolist() == [1, 1, 0, 1]


def test_drafted_request_that_outgrows_cache_fails() -> None:
    # It went back to the queue, where it could never be admitted again.
    drafting = Drafting(tokens=5, acceptance=1.0)
    outcome = simulate(
        workload((1, 2), (8, 30)), one_worker_scenario(kv_tokens=10, drafting=drafting)
    )
    assert outcome.requests.failed.tolist() == [0, 1]


def test_prefill_chunk_bounds_prompt_tokens_per_step() -> None:
    step = StepTime(fixed=1.0, per_token=1.0, prompt_weight=2.0)
    outcome = simulate(workload((10, 2)), one_worker_scenario(step=step, prefill=Prefill(chunk=4)))
    # Four, four and two of the prompt at weight 2, on top of what is there.
    assert outcome.steps.largest.tolist() == [8, 4 + 8, 8 + 4, 11]
    assert outcome.steps.tokens.tolist() == [0, 0, 1, 1]


def test_prefill_skips_cached_blocks() -> None:
    step = StepTime(fixed=1.0, per_token=1.0, prompt_weight=1.0)
    sharing_workload = workload((10, 1), (10, 1), blocks=[[1, 2, 3], [1, 2, 9]])
    scenario = one_worker_scenario(step=step, slots=1, prefill=Prefill(chunk=100, cached_blocks=8))
    steps = simulate(sharing_workload, scenario).steps
    assert steps.largest.tolist() == [10, 8 + 2]
    assert steps.loads.ravel().tolist() == [0, 8]
    cluster_without_cache = replace(scenario.cluster, prefill=Prefill(chunk=100))
    assert (
        simulate(
            sharing_workload, replace(scenario, cluster=cluster_without_cache)
        ).steps.loads.max()
        == 0
    )


def test_prefill_computes_last_token_of_cached_prompt() -> None:
    scenario = one_worker_scenario(slots=1, prefill=Prefill(chunk=1, cached_blocks=8))
    repeated_prompt = workload((8, 1), (8, 1), blocks=[[1, 2], [1, 2]])
    assert simulate(repeated_prompt, scenario).steps.loads.ravel().tolist()[8:] == [7]


def test_prefix_cache_evicts_least_recently_used_blocks() -> None:
    rows = [[1], [2], [1], [3], [2], [1]]
    scenario = one_worker_scenario(slots=1, prefill=Prefill(chunk=100, cached_blocks=2))
    loads = simulate(workload(*[(4, 1)] * 6, blocks=rows), scenario).steps.loads
    # 1 is used again before 3 comes, so 3 drives 2 out; 2 comes back and drives 1 out.
    assert loads.ravel().tolist() == [0, 0, 3, 0, 0, 0]


def test_accepted_drafts_make_several_tokens_per_step() -> None:
    drafting = Drafting(tokens=2, acceptance=1.0)
    outcome = simulate(workload((5, 7)), one_worker_scenario(drafting=drafting))
    assert outcome.steps.tokens.tolist() == [3, 3, 1]
    assert outcome.steps.loads.ravel().tolist() == [5, 8, 11]


def test_rejected_drafts_change_nothing() -> None:
    sample_workload = workload((5, 7), (3, 2), (9, 4), (1, 1))
    rejected_drafting = Drafting(tokens=3, acceptance=0.0)
    plain = simulate(sample_workload, one_worker_scenario(slots=2))
    assert same(
        plain, simulate(sample_workload, one_worker_scenario(slots=2, drafting=rejected_drafting))
    )


def test_clock_skips_idle_time() -> None:
    distant_requests = workload((3, 2), (3, 2), times=[0.0, 1000.0])
    outcome = simulate(distant_requests, replace(one_worker_scenario(), arrivals=TimedArrivals()))
    assert outcome.steps.clock.tolist() == [0, 1, 1000, 1001]
    assert outcome.requests.end.tolist() == [2.0, 1002.0]


def test_request_fails_when_patience_ends() -> None:
    scenario = replace(one_worker_scenario(slots=1), arrivals=TimedArrivals(), queue_timeout=2.5)
    waiting = workload((3, 5), (3, 1), (3, 1), times=[0.0, 0.0, 3.0])
    outcome = simulate(waiting, scenario)
    assert outcome.requests.failed.tolist() == [0, 1, 0]
    assert outcome.requests.end.tolist() == [5.0, 3.0, 6.0]
    # Behind the steps: one, one, and in the third step it has gone and another has come.
    assert outcome.steps.waiting.tolist() == [1, 1, 1, 1, 1, 0]


@given(st.floats(0.001, 10), st.floats(0.01, 50))
def test_queue_timeout_ends_despite_rounding_of_times(start: float, queue_timeout: float) -> None:
    # Nobody is told that the first has ended, so the second waits before an idle worker.
    stale_scenario = Scenario(
        cluster=Cluster(workers=1, slots=1, step=SECOND),
        policy=RoutingPolicySettings(name="br0"),
        arrivals=TimedArrivals(),
        token_delay=1e6,
        queue_timeout=queue_timeout,
    )
    two_requests = workload((3, 1), (3, 1), times=[0.0, start])
    assert simulate(two_requests, stale_scenario).requests.failed.tolist() == [0, 1]


def test_reports_have_configured_age() -> None:
    legacy_policy = RoutingPolicySettings(name="vllm_legacy")
    three_requests = workload((3, 9), (3, 9), (3, 9), times=[0.0, 0.5, 2.5])
    scenario = replace(
        one_worker_scenario(workers=2),
        policy=legacy_policy,
        arrivals=TimedArrivals(),
        report_interval=2.0,
    )
    assert simulate(three_requests, scenario).requests.worker.tolist() == [0, 1, 0]


@every_policy
@settings(max_examples=15)
@given(any_workload=workloads(), scenario=scenarios(), front_ends=st.integers(2, 5))
def test_workers_never_exceed_slots_with_several_front_ends(
    name: str, any_workload: Workload, scenario: Scenario, front_ends: int
) -> None:
    policy_scenario = replace(
        scenario, policy=replace(scenario.policy, name=name), front_ends=front_ends
    )
    outcome = simulate(any_workload, policy_scenario)
    is_served = outcome.requests.failed == 0
    begin, end = outcome.requests.admitted[is_served], outcome.requests.end[is_served]
    for worker in range(policy_scenario.cluster.workers):
        on_worker = outcome.requests.worker[is_served] == worker
        for clock in outcome.steps.clock:
            running = on_worker & (begin <= clock) & (clock < end)
            was_preempted = outcome.requests.preemptions[is_served] > 0
            assert (running & ~was_preempted).sum() <= policy_scenario.cluster.worker_slots[worker]


def test_noise_changes_step_times_only() -> None:
    sample_workload = workload(*[(30, 9)] * 12)
    step = StepTime(fixed=0.0, per_token=1.0)
    noiseless_scenario = one_worker_scenario(workers=3, step=step)
    noisy_scenario = replace(
        noiseless_scenario,
        cluster=replace(noiseless_scenario.cluster, step=replace(step, noise=0.5)),
    )
    outcomes = [
        simulate(sample_workload, scenario) for scenario in (noiseless_scenario, noisy_scenario)
    ]
    assert np.array_equal(outcomes[0].steps.loads, outcomes[1].steps.loads)
    assert (outcomes[0].steps.seconds != outcomes[1].steps.seconds).all()


def test_run_without_served_request_has_nan_figures() -> None:
    outcome = simulate(workload((9, 1), (9, 1)), one_worker_scenario(kv_tokens=8))
    figures = outcome.metrics()
    assert (figures.failed, figures.steps) == (1.0, 0.0)
    undefined_figures = [figures.throughput, figures.bound, figures.imbalance, figures.idle]
    assert np.isnan(undefined_figures).all()


@settings(max_examples=40)
@given(workloads(), scenarios())
def test_simulation_figures_exist_for_every_run(any_workload: Workload, scenario: Scenario) -> None:
    outcome: SimulationRun = simulate(any_workload, scenario)
    figures = outcome.metrics()
    assert set(SimulationMetrics.names()) == set(vars(figures))
    assert np.isnan(figures.gap) or figures.gap >= -1e-12


@every_policy
def test_hold_mode_never_queues_at_a_worker(name: str) -> None:
    policy = RoutingPolicySettings(name=name, when_full=WhenFull.HOLD)
    step = StepTime(fixed=1.0, per_token=0.1)
    cluster = Cluster(workers=3, slots=2, step=step)
    scenario = Scenario(
        cluster=cluster, policy=policy, arrivals=SaturatedArrivals(2), trajectory=1000
    )
    outcome = simulate(workload(*[(1 + i % 7, 1 + i % 5) for i in range(40)]), scenario)
    # Whoever is bound begins in that very step: no worker has more load than its active ones.
    assert outcome.steps.waiting.max() <= 6 + 2
    assert (outcome.requests.first - outcome.requests.admitted > 0).all()


@pytest.mark.parametrize(
    "bad_options",
    [
        {"queue_timeout": -1.0},
        {"token_delay": float("nan")},
        {"report_interval": float("inf")},
        {"front_ends": 0},
        {"seed": -1},
        {"trajectory": -1},
    ],
)
def test_scenario_refuses_bad_values(bad_options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Scenario(**bad_options)  # type: ignore[arg-type]


def test_cluster_and_arrivals_refuse_bad_values() -> None:
    for make in (
        lambda: SaturatedArrivals(0),
        lambda: SaturatedArrivals(-3),
        lambda: Prefill(chunk=0),
        lambda: Prefill(cached_blocks=-1),
        lambda: Drafting(tokens=-1, acceptance=0.5),
        lambda: Drafting(tokens=1, acceptance=1.5),
    ):
        with pytest.raises(UsageError):
            make()
    with pytest.raises(PolicyError):
        simulate(workload((1, 1)), Scenario(policy=RoutingPolicySettings(gamma=2.0)))
    with pytest.raises(UsageError, match="no times"):
        simulate(workload((1, 1)), Scenario(arrivals=TimedArrivals()))


def test_simulate_uses_slots_of_each_worker() -> None:
    scenario = one_worker_scenario(workers=2, slots=(1, 3))
    outcome = simulate(workload(*[(5, 9)] * 8), scenario)
    assert outcome.steps.active[0] == 4
    at_first = outcome.requests.worker[outcome.requests.admitted_step == 0]
    assert sorted(at_first.tolist()) == [0, 1, 1, 1]


@pytest.mark.parametrize("slots", [(3,), (1, 2, 3), (1, 0)])
def test_cluster_refuses_slots_that_are_not_of_its_workers(slots: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="slots"):
        Cluster(workers=2, slots=slots)
