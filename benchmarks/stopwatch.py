"""CPU time of planners, as ratios to greedy's, interleaved with it."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from baseline.greedy import Baseline
from loads import Counts
from shapes import Shape, Trial

from equipoise import _native
from equipoise.balancer.experts import Plan, plan
from equipoise.balancer.experts.placement import Placement


def cpu(call: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def times(shape: Shape, trial: Trial, repeats: int) -> dict[str, Any]:
    """Greedy's own milliseconds; of ours, by what is planned, seconds and ratios to greedy's.

    Greedy is the faster of the fixed baseline and the shipped one, whose plans are equal; else
    `RuntimeError`.
    """
    baseline, ranks, slots = Baseline(), shape.ranks, shape.slots
    first = trial.loads[0]
    shipped = _native.plan_greedy(first, slots, ranks)
    if not np.array_equal(baseline.plan(first, slots, ranks), shipped):
        raise RuntimeError("the shipped greedy plans otherwise than the baseline")
    pairs: dict[str, list[tuple[float, float]]] = {}
    for kind, call in _calls(shape, trial):
        for _ in range(repeats):
            fixed = cpu(lambda: baseline.plan(first, slots, ranks))
            own = cpu(lambda: _native.plan_greedy(first, slots, ranks))
            pairs.setdefault(kind, []).append((min(fixed, own), cpu(call)))
    greedy = [pair[0] for found in pairs.values() for pair in found]
    told = {kind: _told(found) for kind, found in pairs.items()}
    return {"greedy_milliseconds": statistics.median(greedy) * 1e3, **told}


def _told(pairs: list[tuple[float, float]]) -> dict[str, float]:
    ratios = [ours / greedy for greedy, ours in pairs]
    return {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "seconds": statistics.median(ours for _, ours in pairs),
        "seconds_highest": max(ours for _, ours in pairs),
    }


def _calls(shape: Shape, trial: Trial) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """What is timed: one connected plan, and every rebalance of an incremental run."""
    slots, ranks = shape.slots, shape.ranks

    def anew() -> Plan:
        return plan(trial.loads[0], slots=slots, ranks=ranks, policy="connected")

    yield "connected", anew
    installed = anew()
    for load, switched in zip(trial.loads[1:-1], trial.switched[1:-1], strict=True):

        def call(load: Counts = load, before: Placement = installed.placement) -> Plan:
            return plan(load, slots=slots, ranks=ranks, installed=before)

        yield ("switch" if switched else "steady"), call
        installed = call()
