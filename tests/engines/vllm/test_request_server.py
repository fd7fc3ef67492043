"""A real server with two replicas, whose requests go where a policy of ours says."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from engines.vllm.runs import modes
from engines.vllm.runs.case import Case
from engines.vllm.runs.outcome_checks import check_tokens
from engines.vllm.runs.prompts import PROMPTS
from engines.vllm.runs.reference_tokens import Reference
from engines.vllm.runs.run import Outcome
from vllm_cpu.missing_features import PARALLEL

pytestmark = pytest.mark.deep
RunOnce = Callable[[str, Case], Outcome]
References = Mapping[str, Reference]
SERVED = re.compile(r'^vllm:request_success_total\{engine="(\d)",.*\} (\d+)\.0$', re.MULTILINE)
OURS = re.compile(r"^equipoise_vllm_(\w+)(\{.*\})? (\d+)\.0$", re.MULTILINE)


def counters_of(outcome: Outcome) -> dict[str, int]:
    """Our counters at `/metrics`, with the number of the rank after the name."""
    assert outcome.answers is not None
    counters: dict[str, int] = {}
    for name, labels, count in OURS.findall(outcome.answers["metrics"]):
        rank = "".join(re.findall(r"\d", labels))
        counters[name.removesuffix("_total") + rank] = int(count)
    return counters


def served(outcome: Outcome) -> int:
    """Requests that came to their end, as the engine counts them."""
    assert outcome.answers is not None
    return sum(int(count) for _, count in SERVED.findall(outcome.answers["metrics"]))


def routed(outcome: Outcome, requests: int) -> None:
    """A policy sent so many requests, to both ranks, and nothing else happened."""
    counts = counters_of(outcome)
    assert min(counts["routed_requests0"], counts["routed_requests1"]) > 0
    assert counts["routed_requests0"] + counts["routed_requests1"] == requests
    others = ("aborted_requests", "fallback_requests", "dp_policy_failures", "queued_requests")
    assert {name: counts[name] for name in others} == dict.fromkeys(others, 0)


def test_routed_server_keeps_tokens_and_routes_all_requests(
    references: References, run_once: RunOnce
) -> None:
    case = modes.routed(references["qwen3"], "fit")
    outcome = run_once("routed", case)
    check_tokens(outcome, references["qwen3"])
    routed(outcome, case.rounds * len(PROMPTS))


@pytest.mark.parametrize("api_servers", [2, 4])
def test_api_servers_route_over_shared_ranks_by_one_policy(
    references: References, run_once: RunOnce, api_servers: int
) -> None:
    case = modes.routed(references["qwen3"], "fit", api_server_count=api_servers)
    outcome = run_once(f"routed-by-{api_servers}", case)
    check_tokens(outcome, references["qwen3"])
    routed(outcome, case.rounds * len(PROMPTS))
    assert counters_of(outcome)["policy_api_servers"] == api_servers


def test_routed_server_loses_nothing_when_clients_leave(
    references: References, run_once: RunOnce
) -> None:
    # More than there are slots, so that some are held when they go.
    case = replace(modes.routed(references["qwen3"], "fit"), leavers=8)
    outcome = run_once("routed-and-left", case)
    check_tokens(outcome, references["qwen3"])
    counts = counters_of(outcome)
    # Who goes before the server has read what was asked is never known to it.
    assert 0 < counts["aborted_requests"] <= case.rounds * case.leavers
    # Of those who leave, some may be served before the server hears of it.
    served_leavers = served(outcome) - case.rounds * len(PROMPTS)
    assert 0 <= served_leavers <= case.rounds * case.leavers - counts["aborted_requests"]
    assert (
        counts["queued_requests"]
        == counts["dp_policy_failures"]
        == counts["fallback_requests"]
        == 0
    )
    routed_requests = counts["routed_requests0"] + counts["routed_requests1"]
    assert served(outcome) <= routed_requests < served(outcome) + counts["aborted_requests"]


def test_routed_server_wakes_lockstep_ranks_for_held_requests(
    references: References, run_once: RunOnce
) -> None:
    reference = references["qwen3-moe"]
    case = modes.routed(reference, "fit", enable_expert_parallel=True)
    outcome = run_once("routed-experts", replace(case, holes=PARALLEL))
    check_tokens(outcome, reference)
    routed(outcome, case.rounds * len(PROMPTS))


def test_server_without_routing_settings_exports_no_metrics(
    references: References, run_once: RunOnce
) -> None:
    outcome = run_once("replicas", modes.data_parallel(references["qwen3"]))
    check_tokens(outcome, references["qwen3"])
    assert counters_of(outcome) == {}


def test_proxy_routes_to_ranks_of_stock_server(references: References, run_once: RunOnce) -> None:
    case = modes.proxied(references["qwen3"])
    outcome = run_once("proxied", case)
    check_tokens(outcome, references["qwen3"])
    assert counters_of(outcome) == {}
    assert served(outcome) == case.rounds * len(PROMPTS)
    assert outcome.answers is not None
    page = outcome.answers["proxy"]
    assert 'equipoise_route_requests_total{outcome="completed"} 18.0' in page
    for rank in ("rank 0", "rank 1"):
        # A busy engine may be late with one; a report that cannot be read fails ten times a second.
        (line,) = [
            line
            for line in page.splitlines()
            if line.startswith(f'equipoise_route_worker_report_failures_total{{worker="{rank}"}}')
        ]
        assert float(line.split()[-1]) < 10
