"""What options of `equipoise simulate` come to: the cluster, the workload, the policies."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.balancer.requests.catalogue import PrefillRule
from equipoise.balancer.requests.cluster import PER_TOKEN, Drafting, Prefill, PrefillAlignment
from equipoise.balancer.requests.policy_settings import POLICIES, WhenFull
from equipoise.balancer.requests.simulation import SaturatedArrivals, TimedArrivals
from equipoise.balancer.requests.workload import Workload
from equipoise.cli.simulate import (
    COMMAND,
    SWEEP_LOADS,
    SWEEP_WORKERS,
    SimulateRequest,
    run_simulation,
    sweep_points,
)
from equipoise.cli.simulate_setup import known_policies, load_trace, set_up_trial, validate
from equipoise.option import options_of
from equipoise.report.simulation.json_output import to_json

TRACES = os.environ.get("EQUIPOISE_TRACES")
FILES = ("AzureLLMInferenceTrace_conv.csv", "mooncake_conversation_trace.jsonl")


def test_help_says_seconds_per_token_that_is_simulated() -> None:
    assert float(options_of(SimulateRequest)["seconds_per_token"].default) == PER_TOKEN


def request(**options: Any) -> SimulateRequest:
    arguments: dict[str, Any] = {"workload": "sharegpt"} | options
    checked_request = SimulateRequest(**arguments)
    validate(checked_request)
    return checked_request


def write_trace(tmp_path: Path, rows: int = 6) -> Path:
    path = tmp_path / "t.jsonl"
    lines = (
        f'{{"timestamp": {n * 100}, "input_length": {500 + n}, "output_length": {5 + n}, '
        f'"hash_ids": [{n}]}}\n'
        for n in range(rows)
    )
    path.write_text("".join(lines))
    return path


def test_cluster_options_reach_simulated_cluster() -> None:
    setup = set_up_trial(
        request(
            workers=3, slots_per_worker=5, kv_tokens=900, prefill_chunk=64, draft_tokens=2,
            acceptance=0.6, noise=0.1, prompt_weight=4.0, seconds_per_token=2e-7, fixed_share=0.25,
        ),
        None,
    )  # fmt: skip
    cluster = setup.trial.scenario.cluster
    assert (cluster.workers, cluster.slots, cluster.kv_tokens) == (3, 5, 900)
    assert cluster.prefill == Prefill(chunk=64)
    assert cluster.drafting == Drafting(tokens=2, acceptance=0.6)
    step = cluster.step
    assert (step.per_token, step.noise, step.prompt_weight) == (2e-7, 0.1, 4.0)
    workload, scenario = setup.trial.scenario_of_seed(0)
    full = scenario.cluster.step.seconds(scenario.cluster.full_load(workload))
    assert scenario.cluster.step.fixed == pytest.approx(0.25 * full)


def test_slots_and_alignment_of_a_file_reach_simulated_cluster() -> None:
    options = {"slots_per_worker": [4, 2], "prefill_alignment": "sglang", "prefill_chunk": 64}
    parsed = {key: COMMAND.options[key].kind.from_yaml(value) for key, value in options.items()}
    cluster = set_up_trial(request(workers=2, **parsed), None).trial.scenario.cluster
    assert cluster.worker_slots == (4, 2)
    aligned = PrefillAlignment(PrefillRule.PREFILL_DELAYER, 30)
    assert cluster.prefill == Prefill(chunk=64, alignment=aligned)


def test_routing_options_reach_every_policy_in_seconds() -> None:
    setup = set_up_trial(
        request(
            policies=("jsq", "fit"), when_full="hold", window=9, wait_bonus=3.0, slack=0.2,
            overshoot=0.3, prefill_wait=0.5, prefill_chunk=8, prompt_weight=2.0, front_ends=3,
            report_interval=50.0, token_delay=20.0, queue_timeout=7.0,
        ),
        None,
    )  # fmt: skip
    assert [contender.label for contender in setup.contenders] == ["jsq", "fit"]
    for contender in setup.contenders:
        policy = contender.policy
        assert (policy.when_full, policy.window, policy.wait_bonus) == (WhenFull.HOLD, 9, 3.0)
        assert (policy.slack, policy.overshoot) == (0.2, 0.3)
        assert (policy.prompt_weight, policy.prefill_wait) == (2.0, 0.5)
    scenario = setup.trial.scenario
    assert (scenario.front_ends, scenario.queue_timeout) == (3, 7.0)
    assert (scenario.report_interval, scenario.token_delay) == (0.05, 0.02)


@pytest.mark.parametrize("model", ["bfio", "blog", "dyntralb"])
def test_published_step_model_ignores_fixed_share(model: str) -> None:
    setup = set_up_trial(request(step_model=model), None)
    assert setup.trial.fixed_share is None
    step = setup.trial.scenario.cluster.step
    assert step == setup.trial.scenario_of_seed(0)[1].cluster.step
    assert (step.fixed > 0, step.per_mean > 0) == (model != "blog", model == "blog")


def test_workload_draws_40_requests_per_slot_for_each_seed() -> None:
    setup = set_up_trial(request(workers=2, slots_per_worker=3, seed=7, seeds=2), None)
    assert list(setup.trial.seeds) == [7, 8]
    first, second = (setup.trial.workload_factory(seed) for seed in setup.trial.seeds)
    assert first.count == second.count == 240
    assert not first.same_requests(second)
    assert (
        set_up_trial(request(prompt_limit=100), None).trial.workload_factory(0).prompts.max() <= 100
    )


SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "drawn with replacement": ({}, "with replacement"),
    "shuffled for a cache": ({"prefill_chunk": 64, "cached_blocks": 2}, "shuffles the order"),
    "as it is, at drawn times": (
        {"prefill_chunk": 64, "cached_blocks": 2, "load": 0.5},
        "in its order; times of arrival are drawn",
    ),
    "as asked for": ({"sampling": "shuffled"}, "shuffles the order"),
}


@pytest.mark.parametrize(("options", "words"), SAMPLES.values(), ids=SAMPLES.keys())
def test_trace_sampling_states_how_seeds_differ(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    simulate_request = request(workload=None, trace=write_trace(tmp_path), **options)
    trace = load_trace(simulate_request)
    setup = set_up_trial(simulate_request, trace)
    assert trace is not None
    assert words in setup.sampling
    workload = setup.trial.workload_factory(1)
    assert workload.count == trace.count
    assert (workload.hashes is None) == ("replacement" in words)
    same = sorted(workload.prompts) == sorted(trace.prompts)
    assert same == ("replacement" not in words)
    assert np.array_equal(workload.prompts, trace.prompts) == ("in its order" in words)


ARRIVALS: dict[str, tuple[dict[str, Any], type, str]] = {
    "nothing said": ({}, SaturatedArrivals, "saturated"),
    "saturated": ({"load": "saturated"}, SaturatedArrivals, "saturated"),
    "a load": ({"load": 0.5}, TimedArrivals, "at random at 0.5 of the capacity"),
    "a load, the trace's times": (
        {"load": 0.5, "arrivals": "trace"},
        TimedArrivals,
        "at the trace's times, stretched, at 0.5 of",
    ),
    "the trace's times": ({"arrivals": "trace"}, TimedArrivals, "at the trace's own times"),
}


@pytest.mark.parametrize(("options", "kind", "words"), ARRIVALS.values(), ids=ARRIVALS.keys())
def test_arrival_options_select_arrival_process(
    tmp_path: Path, options: dict[str, Any], kind: type, words: str
) -> None:
    simulate_request = request(workload=None, trace=write_trace(tmp_path), **options)
    setup = set_up_trial(simulate_request, load_trace(simulate_request))
    assert words in setup.arrivals
    workload, scenario = setup.trial.scenario_of_seed(0)
    assert isinstance(scenario.arrivals, kind)
    assert workload.arrivals is not None
    if options == {"arrivals": "trace"}:
        assert workload.arrivals[-1] == pytest.approx(0.5)


def test_trace_is_cut_to_requested_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path)

    def traced_workload(count: int) -> Workload | None:
        return load_trace(request(workload=None, trace=path, requests=count))

    few, many = traced_workload(4), traced_workload(9)
    assert few is not None
    assert many is not None
    assert (few.count, many.count) == (4, 6)
    assert capsys.readouterr().err == f"equipoise: warning: --requests 9: {path} gave 6\n"


def test_known_policies_follow_rule_order_with_oracle_after_brh() -> None:
    names = list(known_policies())
    assert names[names.index("brh") + 1] == "brh_oracle"
    names.remove("brh_oracle")
    assert names == list(POLICIES)


def test_sweep_without_points_uses_default_points() -> None:
    assert sweep_points(request()) == ()
    assert sweep_points(request(sweep="load")) == SWEEP_LOADS
    assert sweep_points(request(sweep="workers")) == SWEEP_WORKERS
    assert sweep_points(request(sweep="load", points=(0.5,))) == (0.5,)


def test_simulate_warns_when_seeds_share_recorded_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_simulation(
        request(
            workload=None, trace=write_trace(tmp_path), sampling="recorded", seeds=2, workers=1,
            policies=("fit",), quiet=True,
        )
    )  # fmt: skip
    assert "seeds differ in nothing but what policies and noise draw" in capsys.readouterr().err


@pytest.mark.skipif(TRACES is None, reason="EQUIPOISE_TRACES names no folder")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("load", [None, 0.7])
def test_published_trace_is_simulated_without_failures(name: str, load: float | None) -> None:
    path = Path(str(TRACES)) / name
    if not path.exists():
        pytest.skip(f"EQUIPOISE_TRACES has no {name}")
    report = run_simulation(
        request(
            workload=None, trace=path, requests=400, workers=4, slots_per_worker=8, seeds=2,
            load=load, policies=("round_robin", "fit"), quiet=True,
        )
    )  # fmt: skip
    assert report.subject.requests.count == 400
    figures = to_json(report)["policies"]
    assert all(one["intervals"]["failed"]["mean"] == 0 for one in figures.values())
    slow, fast = (figures[name]["intervals"]["idle"]["mean"] for name in ("round_robin", "fit"))
    assert fast < slow
