"""What a decision costs, and how fast the simulator steps.

    python benchmarks/request_speed.py

*Decision*: saturated workers of 64 slots, 4 waiting requests for each; a request ends, another
arrives, and `dispatch` of the native router is timed, the call from Python included. Median and
99th percentile of 20,000 decisions, in microseconds; in turns over the policies, five rounds,
spread of the medians beside.

*Simulator*: steps a second of one thread, `br0` and `fit`, prop on 8 workers x 72 slots.

Writes benchmarks/results/request_speed.json; `python benchmarks/performance.py` shows it.
"""

import sys
import time
from typing import Any

import numpy as np
import request_page
from evidence import save
from request_workloads import PUBLISHED

from equipoise import _native
from equipoise.balancer.requests.generators import generate
from equipoise.balancer.requests.rules import RULES, PolicySettings
from equipoise.balancer.requests.simulation import Scenario, simulate

WORKERS = (8, 32, 128)
SLOTS = 64
DECISIONS = 4_000
ROUNDS = 5
UNLIMITED = 1 << 59


class Bench:
    """A saturated router whose requests end in the order in which they began."""

    def __init__(self, name: str, workers: int) -> None:
        settings = PolicySettings(name=name).native()
        self._router = _native.Router(settings, workers, SLOTS, UNLIMITED)
        drawn = generate("prop", 20_000, workers)
        self._sizes = [int(size) for size in drawn.prompts]
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
        spent = time.perf_counter_ns() - began
        self._running += [request for request, _ in pairs]
        return spent / 1e3

    def decide(self) -> float:
        """Microseconds of one decision."""
        ended = self._running.pop(0)
        self._router.advance([ended], [600], [ended])
        self._arrive()
        return self._dispatch()


def decisions(workers: int) -> dict[str, Any]:
    """Of every policy, in turns."""
    benches = {name: Bench(name, workers) for name in RULES}
    spent: dict[str, list[list[float]]] = {name: [] for name in RULES}
    for _ in range(ROUNDS):
        for name, bench in benches.items():
            spent[name].append([bench.decide() for _ in range(DECISIONS)])
    return {name: told(rounds) for name, rounds in spent.items()}


def told(rounds: list[list[float]]) -> dict[str, float]:
    """Median and tail of all, and how far the medians of rounds lie apart."""
    medians = [float(np.median(part)) for part in rounds]
    every = np.concatenate([np.asarray(part) for part in rounds])
    return {
        "median": float(np.median(every)),
        "p99": float(np.percentile(every, 99)),
        "lowest": min(medians),
        "highest": max(medians),
    }


def stepping(name: str) -> dict[str, float]:
    """Steps a second, by round."""
    workload, scenario = PUBLISHED.trial().staged(0)
    rates = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        outcome = simulate(
            workload, Scenario(cluster=scenario.cluster, policy=PolicySettings(name=name))
        )
        rates.append(outcome.steps.clock.size / (time.perf_counter() - began))
    return {"median": float(np.median(rates)), "lowest": min(rates), "highest": max(rates)}


def main() -> None:
    """Measure, print, write."""
    figures = {
        "decisions": {str(workers): decisions(workers) for workers in WORKERS},
        "steps": {name: stepping(name) for name in ("br0", "fit")},
    }
    sys.stdout.write("\n".join(request_page.speed(figures)) + "\n")
    save("request_speed", ["python", "benchmarks/request_speed.py"], figures)


if __name__ == "__main__":
    main()
