"""Front ends that share a policy balance as one front end does; with a policy each they do not."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.balancer.requests.workload_generators import generate

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def imported() -> Any:
    """`lib.lockstep_front_ends`; the folder of benchmarks is no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return import_module("lib.lockstep_front_ends")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "shorter"), [("prop", 40), ("az24", 40), ("reason", 80), ("sharegpt", 10)]
)
def test_shared_policy_balances_eight_front_ends_like_one(workload: str, shorter: int) -> None:
    lib = imported()
    drawn = generate(workload, 600, 5)
    requests = replace(drawn, outputs=np.maximum(drawn.outputs // shorter, 1))

    def imbalance(scenario: Any) -> float:
        return float(lib.Fleet(scenario, 5).serve(requests).imbalance(scenario.slots))

    alone = imbalance(lib.FrontEnds(1, lib.Sharing.REPORTS))
    late = imbalance(lib.FrontEnds(1, link_seconds=lib.STEP_SECONDS))
    assert imbalance(lib.FrontEnds(8)) <= 1.2 * alone
    assert imbalance(lib.FrontEnds(8, link_seconds=lib.STEP_SECONDS)) <= 1.2 * late
    assert imbalance(lib.FrontEnds(8, lib.Sharing.REPORTS)) > 2 * alone
