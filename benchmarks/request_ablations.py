"""What request balance depends on: scale, load, staleness, step times, drafts, prefixes, knobs.

    EQUIPOISE_TRACES=FOLDER python benchmarks/request_ablations.py
    python benchmarks/request_ablations.py --only drafting     this part; nothing is kept

Simulated, five seeds, as `request_routing.py`. Writes benchmarks/results/request_ablations.json;
`python benchmarks/report.py` shows it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from lib.results import save
from report import show
from request_routing import CASES, MOONCAKE, SEEDS, Case, folder, pair, runnable, thousand, trace

from equipoise.balancer.requests.catalogue import PrefillRule
from equipoise.balancer.requests.cluster import (
    Cluster,
    Drafting,
    Prefill,
    PrefillAlignment,
    StepTime,
)
from equipoise.balancer.requests.policy_comparison import (
    ComparisonSetup,
    NamedPolicy,
    compare_policies,
    named_policies,
)
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings
from equipoise.balancer.requests.simulation import Scenario
from equipoise.balancer.requests.workload import Workload

Rows = list[dict[str, Any]]
SHOWN_FIGURES = ("imbalance", "throughput", "ttft_mean", "tpot_mean", "wait_p99")
PROP = CASES[1]
MANY = Case("ShareGPT, 128 x 8", 128, 8, "sharegpt", count=60_000)
"""Many workers with few slots each, several of which are free after every step."""
FEW = ("jsq", "vllm", "jsq_load", "br0", "fit")
PREFIXES = ("sglang_cache", "dynamo", "llm_d", "tpu_inference")
PROMPT_WEIGHT = 200.0
"""KV tokens whose reading takes as long as computing one prompt token: 2e-5 s by 1e-7 s."""


def rows(trial: ComparisonSetup, entered: Sequence[NamedPolicy], **settings: Any) -> Rows:
    """One row for each contender."""
    sys.stderr.write(f"{settings}\n")
    return [
        {
            **settings,
            **figures(
                result.named_policy.label,
                {name: asdict(result.interval(name)) for name in SHOWN_FIGURES},
            ),
        }
        for result in compare_policies(trial, entered)
    ]


def figures(policy: str, intervals: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Means with their half widths."""
    return {
        "policy": policy,
        "imbalance": thousand(intervals["imbalance"]),
        "throughput": pair(intervals["throughput"]),
        "wait_p99": pair(intervals["wait_p99"]),
        "ttft": intervals["ttft_mean"]["mean"],
        "tpot_ms": 1e3 * intervals["tpot_mean"]["mean"],
    }


def staged(trial: ComparisonSetup, change: Callable[[Scenario], Scenario]) -> ComparisonSetup:
    """The trial with another scenario."""
    return replace(trial, scenario=change(trial.scenario))


def scaling() -> Rows:
    """4 to 32 workers, as many requests for each."""
    table_rows: Rows = []
    for workers in (4, 8, 16, 32):
        case = replace(PROP, count=1_250 * workers)
        table_rows += rows(case.trial(workers=workers), named_policies(FEW), workers=workers)
    return table_rows


def loads() -> Rows:
    """Half of the capacity to more than it."""
    table_rows: Rows = []
    for load in (0.5, 0.7, 0.8, 0.9, 1.0, 1.2):
        table_rows += rows(PROP.trial(load), named_policies(FEW), load=load)
    return table_rows


def staleness() -> Rows:
    """What is known of tokens and ends comes late; so do reports, where they come sooner."""
    table_rows: Rows = []
    for delay in (0.0, 0.02, 0.1, 0.5):
        trial = staged(
            PROP.trial(), lambda scenario, delay=delay: replace(scenario, token_delay=delay)
        )
        table_rows += rows(trial, named_policies(FEW), seconds=delay)
    return table_rows


def front_ends() -> Rows:
    """Several, each with its own requests; reports every 100 ms."""
    table_rows: Rows = []
    for count in (1, 2, 4):
        trial = staged(
            PROP.trial(),
            lambda scenario, count=count: replace(scenario, front_ends=count, report_interval=0.1),
        )
        table_rows += rows(trial, named_policies(FEW), front_ends=count)
    return table_rows


def step_times() -> Rows:
    """The fixed part of a step, and work that is not what the policy thinks."""
    table_rows: Rows = []
    for share in (0.0, 0.3, 0.5, 0.7):
        table_rows += rows(
            replace(PROP.trial(), fixed_share=share), named_policies(FEW), fixed=share, noise=0.0
        )
    for noise in (0.02, 0.1):
        trial = staged(
            PROP.trial(),
            lambda scenario, noise=noise: replace(
                scenario, cluster=replace(scenario.cluster, step=StepTime(noise=noise))
            ),
        )
        table_rows += rows(trial, named_policies(FEW), fixed=0.5, noise=noise)
    return table_rows


def drafting() -> Rows:
    """Speculative decoding: up to three drafts a step."""
    table_rows: Rows = []
    for drafts, acceptance in ((1, 0.8), (3, 0.7)):
        trial = staged(
            PROP.trial(),
            lambda scenario, drafts=drafts, acceptance=acceptance: replace(
                scenario, cluster=replace(scenario.cluster, drafting=Drafting(drafts, acceptance))
            ),
        )
        table_rows += rows(trial, named_policies(FEW), drafts=drafts, acceptance=acceptance)
    return table_rows


def knobs(case: Case) -> Rows:
    """Settings of `fit`, one at a time."""
    grid = (
        *(("window", value) for value in (1, 8, 32, 1024)),
        *(("wait_bonus", value) for value in (0.0, 0.003, 0.0125, 0.05)),
        *(("slack", value) for value in (0.0, 1.0, 1.5, 100.0)),
        *(("overshoot", value) for value in (0.0, 0.1, 0.2)),
    )
    entered = [
        NamedPolicy(f"{name} {value:g}", replace(RoutingPolicySettings(), **{name: value}))
        for name, value in grid
    ]
    return rows(case.trial(), entered, case=case.title)


def looking(weight: float) -> tuple[NamedPolicy, ...]:
    """Peers; `fit` blind to prompts, told what they weigh, and as it is."""
    return (
        *named_policies(("jsq", "vllm", "jsq_load", "br0")),
        NamedPolicy("fit, blind to prompts", RoutingPolicySettings(prompt_weight=0.0)),
        NamedPolicy("fit, told the weight", RoutingPolicySettings(prompt_weight=weight)),
        NamedPolicy("fit", RoutingPolicySettings()),
    )


def computing(
    scenario: Scenario, weight: float, cached: int = 0, rule: PrefillAlignment | None = None
) -> Scenario:
    """Workers compute the prompts themselves, beside decoding."""
    cluster = replace(
        scenario.cluster,
        step=replace(scenario.cluster.step, prompt_weight=weight),
        prefill=Prefill(chunk=8192, cached_blocks=cached, alignment=rule),
    )
    return replace(scenario, cluster=cluster)


def prompts() -> Rows:
    """Prompts computed beside decoding: what they weigh, and how full the workers are."""
    table_rows: Rows = []
    for case in (case for case in runnable() if case.count <= 10_000):
        for weight in (20.0, 50.0, 200.0):
            trial = staged(case.trial(), lambda scenario, w=weight: computing(scenario, w))
            table_rows += rows(trial, looking(weight), case=case.title, weight=weight)
    return table_rows


def alignments() -> Rows:
    """What the engine does itself to compute prompts in the same steps."""
    rules = (
        None,
        PrefillAlignment(PrefillRule.PREFILL_DELAYER, 30),
        PrefillAlignment(PrefillRule.SCHEDULE_INTERVAL, 8),
        PrefillAlignment(PrefillRule.SCHEDULE_INTERVAL, 32),
        PrefillAlignment(PrefillRule.ATTENTION_DP, 50),
    )
    weighed = RoutingPolicySettings(prompt_weight=PROMPT_WEIGHT)
    entered = (
        *named_policies(("jsq", "br0")),
        NamedPolicy("fit", weighed),
        NamedPolicy("fit, prefill_wait 0", replace(weighed, prefill_wait=0.0)),
    )
    table_rows: Rows = []
    for case in (case for case in runnable() if case.count <= 10_000):
        for rule in rules:
            trial = staged(
                case.trial(), lambda scenario, r=rule: computing(scenario, PROMPT_WEIGHT, rule=r)
            )
            name = "none" if rule is None else f"{rule.rule.value}:{rule.limit}"
            table_rows += rows(trial, entered, case=case.title, alignment=name)
    return table_rows


def prefixes() -> Rows:
    """Workers that keep blocks, too: Mooncake's requests in their order."""
    full_trace = trace(MOONCAKE)

    def draw(seed: int) -> Workload:
        # The prefix of the trace differs by seed; its order, and so what is cached, is the trace's.
        return full_trace.first(full_trace.count - 100 * (seed - SEEDS[0]))

    cluster = Cluster(workers=8, slots=16)
    scenario = computing(Scenario(cluster=cluster), PROMPT_WEIGHT, cached=4_000)
    credited = RoutingPolicySettings(prompt_weight=PROMPT_WEIGHT, prefill_wait=0.0)
    entered = (
        *looking(PROMPT_WEIGHT),
        *named_policies(PREFIXES),
        NamedPolicy("fit, prefill_wait 0", credited),
    )
    table_rows: Rows = []
    for load in (0.2, 0.3, 0.5):
        trial = ComparisonSetup(workload_factory=draw, seeds=SEEDS, scenario=scenario, load=load)
        table_rows += rows(trial, entered, load=load)
    return table_rows


PARTS: dict[str, Callable[[], Rows]] = {
    "scaling": scaling,
    "loads": loads,
    "staleness": staleness,
    "front_ends": front_ends,
    "step_times": step_times,
    "drafting": drafting,
    "knobs": lambda: [row for case in (*runnable(), MANY) for row in knobs(case)],
    "prompts": prompts,
    "alignments": alignments,
    "prefixes": lambda: prefixes() if folder() is not None else [],
}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts; nothing is kept")
    only = parser.parse_args().only
    tables = {name: part() for name, part in PARTS.items() if name in (only or PARTS)}
    show("request_ablations", {}, tables)
    if only is None and folder() is not None:
        save("request_ablations", ["python", "benchmarks/request_ablations.py"], {}, tables)


if __name__ == "__main__":
    main()
