"""Routers of requests: how even they keep workers, simulated, and what a decision costs.

    EQUIPOISE_TRACES=FOLDER python benchmarks/request_routing.py
    python benchmarks/request_routing.py --speed      what a decision costs
    python benchmarks/request_routing.py --quick      either, with one seed or round; not kept

*Balance*: every policy on the same requests: the replication of published figures, five saturated
workloads, and two of lower load. Simulated, so the same figures come on every machine. Five seeds;
policies meet the same requests, and differences are taken seed by seed. Real traces are read from
the folder that EQUIPOISE_TRACES names; without it, only what is generated is run.

*Speed*: saturated workers of 64 slots, 4 waiting requests for each; a request ends, another
arrives, and `dispatch` of the native router is timed, the call from Python included. Median and
99th percentile of 20,000 decisions, in microseconds; in turns over the policies, five rounds. And
simulated steps a second of one thread, `br0` and `fit`, prop on 8 workers x 72 slots.

Writes benchmarks/results/{request_routing,request_speed}.json; `python benchmarks/report.py` shows
them.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from lib.results import Row, save, spread
from report import show

from equipoise import _native
from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.policy_comparison import (
    ComparisonSetup,
    PolicyResult,
    WorkloadFactory,
    compare_policies,
    named_policies,
)
from equipoise.balancer.requests.policy_settings import POLICIES, RoutingPolicySettings
from equipoise.balancer.requests.simulation import Scenario, simulate
from equipoise.balancer.requests.traces import read_trace
from equipoise.balancer.requests.workload import Workload
from equipoise.balancer.requests.workload_generators import generate

TRACES = "EQUIPOISE_TRACES"
SEEDS = tuple(range(100, 105))
"""Not those that the settings of `fit` were chosen on, which were 0 to 4."""
MOONCAKE = "mooncake_conversation_trace.jsonl"
AZURE = "AzureLLMInferenceTrace_conv.csv"


@dataclass(frozen=True)
class Case:
    """A workload on a cluster; `trace` is its file, or None where it is generated."""

    title: str
    workers: int
    slots: int
    name: str
    count: int = 10_000
    trace: str | None = None

    def draw(self, seed: int) -> Workload:
        """Generated anew, or the trace's requests drawn with replacement."""
        if self.trace is None:
            return generate(self.name, self.count, seed)
        return trace(self.trace).resampled(seed)

    def trial(self, load: float | None = None, workers: int | None = None) -> ComparisonSetup:
        """Five seeds, half of the step fixed; saturated, or at `load` of the capacity."""
        cluster = Cluster(workers=workers or self.workers, slots=self.slots)
        draw: WorkloadFactory = self.draw
        return ComparisonSetup(
            workload_factory=draw, seeds=SEEDS, scenario=Scenario(cluster=cluster), load=load
        )


PUBLISHED = Case("prop, 8 workers x 72 slots", 8, 72, "prop", 32_000)
"""The replication of BalanceRoute's table. With its 8,000 requests the imbalance of round_robin, by
which all are divided, varies by a tenth between sets of five seeds; so four times as many."""
CASES = (
    Case("Mooncake conversation, 8 x 16", 8, 16, "mooncake", trace=MOONCAKE),
    Case("prop, 8 x 32", 8, 32, "prop"),
    Case("Azure 2023 conversation, 16 x 64", 16, 64, "azure", trace=AZURE),
    Case("reason, 16 x 32", 16, 32, "reason", count=3_000),
    Case("reason, 16 x 32, three times as long", 16, 32, "reason"),
)
"""The fourth has as many requests as the table that the project started from; the longest outputs,
of 32,768 tokens, have hardly ended when it does. So the fifth: what comes then."""


def folder() -> Path | None:
    """Of the traces, if anybody named one."""
    path = os.environ.get(TRACES)
    return Path(path) if path else None


@cache
def trace(name: str) -> Workload:
    """A file of that folder."""
    where = folder()
    assert where is not None, f"{TRACES} names the folder of {name}"
    return read_trace(where / name)


def runnable() -> tuple[Case, ...]:
    """Those that can be run here."""
    return tuple(case for case in CASES if case.trace is None or folder() is not None)


NAMES = (*(name for name in POLICIES if name != "fit"), "brh_oracle", "fit")
REPLICATED = {"round_robin": 1.0, "jsq": 0.84, "br0": 0.20, "brh_oracle": 0.0925}
"""Imbalance in terms of round_robin's: BalanceRoute's table, `Proprietary`, 8 workers."""
LOADS = (0.5, 0.8)
BELOW = ("jsq", "jsq_load", "br0", "fit")
SHOWN_FIGURES = ("imbalance", "idle", "throughput", "gap", "tpot_p95", "wait_p99", "fairness")


def policy_row(result: PolicyResult, fit: PolicyResult) -> dict[str, Any]:
    """Intervals of one policy, and what `fit` is beside it."""
    return {
        "figures": {name: asdict(result.interval(name)) for name in SHOWN_FIGURES},
        "fit_beside": {
            name: asdict(fit.relative_to(result, name)) for name in ("imbalance", "throughput")
        },
    }


def table(trial: ComparisonSetup, names: Sequence[str]) -> dict[str, Any]:
    """All policies of one trial, by label."""
    results = compare_policies(trial, named_policies(names))
    [fit] = [result for result in results if result.named_policy.label == "fit"]
    return {result.named_policy.label: policy_row(result, fit) for result in results}


def case_of(case: Case, seeds: Sequence[int]) -> dict[str, Any]:
    """Saturated, and at parts of the capacity."""
    sys.stderr.write(f"{case.title}\n")
    return {
        "title": case.title,
        "saturated": table(replace(case.trial(), seeds=seeds), NAMES),
        "below": {
            f"{load:g}": table(replace(case.trial(load), seeds=seeds), BELOW) for load in LOADS
        },
    }


def thousand(interval: dict[str, Any]) -> list[float]:
    """[mean, half], in thousands."""
    return [interval["mean"] / 1e3, interval["half"] / 1e3]


def pair(interval: dict[str, float]) -> list[float]:
    """[mean, half]."""
    return [interval["mean"], interval["half"]]


def balance_tables(measurements: dict[str, Any]) -> dict[str, list[Row]]:
    """Replication, the saturated workloads, and below saturation."""
    replicated, published = [], measurements["published"]
    base = published["round_robin"]["figures"]["imbalance"]["mean"]
    for name in (*REPLICATED, "fit"):
        each = published[name]["figures"]["imbalance"]
        row = {"policy": name, "imbalance": thousand(each), "part": each["mean"] / base}
        if name in REPLICATED:
            row |= {"published": REPLICATED[name], "off": row["part"] / REPLICATED[name] - 1}
        replicated.append(row)
    saturated, below = [], []
    for case in measurements["cases"]:
        for name, row in case["saturated"].items():
            intervals, fit = row["figures"], row["fit_beside"]
            saturated.append({
                "case": f"{case['title']}, saturated",
                "policy": name,
                "imbalance": thousand(intervals["imbalance"]),
                "throughput": pair(intervals["throughput"]),
                "tpot_p95_ms": 1e3 * intervals["tpot_p95"]["mean"],
                **{key: intervals[key]["mean"] for key in ("idle", "gap", "wait_p99", "fairness")},
                **({} if name == "fit" else {
                    "fit_imbalance": pair(fit["imbalance"]),
                    "fit_throughput": pair(fit["throughput"]),
                }),
            })  # fmt: skip
        for load, rows in case["below"].items():
            imbalances = {name: thousand(row["figures"]["imbalance"]) for name, row in rows.items()}
            part = 1 + rows["jsq_load"]["fit_beside"]["imbalance"]["mean"]
            below.append({"case": case["title"], "load": float(load), **imbalances, "part": part})
    return {"replication": replicated, "saturated": saturated, "below": below}


def balance_figures(tables: dict[str, list[Row]]) -> Row:
    """What bars are about."""
    bars: Row = {
        "replication": max(abs(row["off"]) for row in tables["replication"] if "off" in row),
        "below": max(row["part"] for row in tables["below"]),
    }
    for case in dict.fromkeys(row["case"] for row in tables["saturated"]):
        rows = {row["policy"]: row for row in tables["saturated"] if row["case"] == case}
        title = case.removesuffix(", saturated")
        bars[f"{title}: fit"] = fit_verdict(rows)
        bars[f"{title}: wait"] = rows["fit"]["wait_p99"] / rows["br0"]["wait_p99"]
    return bars


def fit_verdict(rows: dict[str, Row]) -> Row:
    """`fit` against every other policy: worse where an interval lies on its wrong side."""
    other_rows = {name: row for name, row in rows.items() if name != "fit"}

    def sure(row: Row, sign: int) -> list[bool]:
        more, faster = row["fit_imbalance"], row["fit_throughput"]
        return [more[0] + sign * more[1] > 0, faster[0] - sign * faster[1] < 0]

    worse = [name for name, row in other_rows.items() if any(sure(row, -1))]
    ties = [name for name, row in other_rows.items() if name not in worse and any(sure(row, 1))]
    verdict = f"not {', '.join(worse)}" if worse else "all"
    note = f"not to be told from {', '.join(ties)} in one of the two" if ties else ""
    return {"value": verdict, "note": note, "met": not worse}


def measure_balance(quick: bool) -> None:
    """Run, print, write."""
    seeds = SEEDS[:1] if quick else SEEDS
    cases = [case for case in runnable() if case.trace is None][:1] if quick else runnable()
    measurements = {
        "published": table(replace(PUBLISHED.trial(), seeds=seeds), NAMES),
        "cases": [case_of(case, seeds) for case in cases],
    }
    tables = balance_tables(measurements)
    show("request_routing", balance_figures(tables), tables)
    if not quick and folder() is not None:
        command = ["python", "benchmarks/request_routing.py"]
        save("request_routing", command, balance_figures(tables), tables)


WORKERS = (8, 32, 128)
SLOTS = 64
DECISIONS = 4_000
SPEED_ROUNDS = 5
UNLIMITED = 1 << 59


class Bench:
    """A saturated router whose requests end in the order in which they began."""

    def __init__(self, name: str, workers: int) -> None:
        settings = RoutingPolicySettings(name=name).native()
        self._router = _native.Router(settings, workers, SLOTS, UNLIMITED)
        self._router.count_steps_by_caller()
        workload = generate("prop", 20_000, workers)
        self._sizes = [int(size) for size in workload.prompts]
        self._next = 0
        self._running: list[int] = []
        for _ in range(workers * (SLOTS + 4)):
            self._arrive()
        self._dispatch()

    def _arrive(self) -> None:
        self._router.arrive(self._sizes[self._next % len(self._sizes)], -1, [], -1)
        self._next += 1

    def _dispatch(self) -> float:
        began = time.perf_counter_ns()
        pairs = self._router.dispatch()
        elapsed = time.perf_counter_ns() - began
        self._running += [request for request, _ in pairs]
        return elapsed / 1e3

    def decide(self) -> float:
        """Microseconds of one decision."""
        request = self._running.pop(0)
        self._router.advance([request], [600], [request], nan)
        self._arrive()
        return self._dispatch()


def decisions(workers: int, rounds: int) -> dict[str, list[float]]:
    """Of every policy, in turns: median and P99 of a decision."""
    benches = {name: Bench(name, workers) for name in POLICIES}
    durations: dict[str, list[float]] = {name: [] for name in POLICIES}
    for _ in range(rounds):
        for name, bench in benches.items():
            durations[name] += [bench.decide() for _ in range(DECISIONS)]
    return {
        name: [float(np.percentile(each, part)) for part in (50, 99)]
        for name, each in durations.items()
    }


def stepping(name: str, rounds: int) -> list[float]:
    """Steps a second, of the rounds."""
    workload, scenario = PUBLISHED.trial().scenario_of_seed(0)
    rates = []
    for _ in range(rounds):
        began = time.perf_counter()
        outcome = simulate(
            workload, Scenario(cluster=scenario.cluster, policy=RoutingPolicySettings(name=name))
        )
        rates.append(outcome.steps.clock.size / (time.perf_counter() - began))
    return spread(rates)


def speed_figures(measurements: dict[str, Any]) -> tuple[Row, dict[str, list[Row]]]:
    """Bars, and a row for each policy.

    `measurements` has decisions by workers, and steps by policy.
    """
    by_workers = measurements["decisions"]
    rows = [
        {"policy": name, **{f"workers_{count}": by_workers[count][name] for count in by_workers}}
        for name in next(iter(by_workers.values()))
    ]
    fit = rows[-1]
    figures = {
        **{f"fit_{count}": fit[f"workers_{count}"][0] for count in by_workers},
        **{f"steps_{name}": rates for name, rates in measurements["steps"].items()},
    }
    return figures, {"decisions": rows}


def measure_speed(quick: bool) -> None:
    """Measure, print, write."""
    rounds = 1 if quick else SPEED_ROUNDS
    figures, tables = speed_figures({
        "decisions": {workers: decisions(workers, rounds) for workers in WORKERS},
        "steps": {name: stepping(name, rounds) for name in ("br0", "fit")},
    })  # fmt: skip
    show("request_speed", figures, tables)
    if not quick:
        command = ["python", "benchmarks/request_routing.py", "--speed"]
        save("request_speed", command, figures, tables)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speed", action="store_true", help="what a decision costs")
    parser.add_argument("--quick", action="store_true", help="one seed or round; nothing is kept")
    options = parser.parse_args()
    (measure_speed if options.speed else measure_balance)(options.quick)


if __name__ == "__main__":
    main()
