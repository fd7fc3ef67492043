"""Every policy on the same requests: the replication, four saturated workloads, and below.

    EQUIPOISE_TRACES=FOLDER python benchmarks/request_balance.py
    python benchmarks/request_balance.py --quick      one seed of what is generated; nothing is kept

Simulated, so the same figures come on every machine. Five seeds; policies meet the same requests,
and differences are taken seed by seed. A bar is missed where the 95 % confidence interval of the
paired difference lies on its wrong side.

Writes benchmarks/results/request_balance.json; `python benchmarks/performance.py` shows it.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import request_page
from evidence import save
from request_workloads import PUBLISHED, SEEDS, Case, runnable

from equipoise.balancer.requests.comparison import Result, Trial, compare, contenders
from equipoise.balancer.requests.rules import RULES

NAMES = (*(name for name in RULES if name != "fit"), "brh_oracle", "fit")
LOADS = (0.5, 0.8)
BELOW = ("jsq", "jsq_load", "br0", "fit")
SHOWN = (
    *("imbalance", "idle", "throughput", "gap", "tpot_mean", "tpot_p95", "ttft_mean", "ttft_p99"),
    *("wait_mean", "wait_p99", "wait_max", "fairness", "occupancy"),
)


def row(result: Result, fit: Result) -> dict[str, Any]:
    """Intervals of one policy, and what `fit` is beside it."""
    return {
        "figures": {name: asdict(result.interval(name)) for name in SHOWN},
        "fit_beside": {
            name: asdict(fit.beside(result, name)) for name in ("imbalance", "throughput")
        },
    }


def table(trial: Trial, names: Sequence[str]) -> dict[str, Any]:
    """All policies of one trial, by label."""
    results = compare(trial, contenders(names))
    [fit] = [result for result in results if result.contender.label == "fit"]
    return {result.contender.label: row(result, fit) for result in results}


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


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed; nothing is kept")
    quick = parser.parse_args().quick
    seeds = SEEDS[:1] if quick else SEEDS
    figures = {
        "seeds": len(seeds),
        "published": table(replace(PUBLISHED.trial(), seeds=seeds), NAMES),
        "cases": [case_of(case, seeds) for case in runnable()],
    }
    sys.stdout.write("\n".join(request_page.balance(figures)) + "\n")
    if not quick:
        save("request_balance", ["python", "benchmarks/request_balance.py"], figures)


if __name__ == "__main__":
    main()
