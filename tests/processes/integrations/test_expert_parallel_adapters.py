"""The adapters of expert-parallel libraries keep the clauses, over stand-ins for the libraries.

The stand-ins do what the libraries' signatures and docstrings say. No library itself runs here.
"""

from contextlib import closing

import pytest
from helpers.tiers import DEEP

from equipoise.hal.conformance import suite
from equipoise.hal.conformance.clauses import EXPERT_PARALLEL
from equipoise.hal.conformance.executors.processes import ProcessSubject
from equipoise.hal.conformance.search import (
    PropertyHeld,
    PropertyViolated,
    SearchSettings,
    search,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
CASES = 60 if DEEP else 4
STAND_INS = "helpers.fakes.fake_expert_libraries"


@pytest.mark.parametrize(
    ("library", "declared"),
    [
        ("NORMAL", 11),
        ("LOW_LATENCY", 12),
        ("NIXL_EP", 12),
        ("NCCL_LOW_LATENCY", 11),
        ("NCCL_THROUGHPUT", 9),
        ("FLASHINFER_ONE_SIDED", 10),
        ("FLASHINFER_TWO_SIDED", 9),
        ("TORCH_NPU", 10),
        ("TORCH_NPU_A3", 10),
    ],
)
def test_adapter_keeps_clauses_over_its_stand_in(library: str, declared: int) -> None:
    with closing(ProcessSubject("cpu", "gloo", 2, library=f"{STAND_INS}:{library}")) as subject:
        verdicts = {
            prop.name: search(prop, subject, SearchSettings(cases=CASES, max_shrinks=0))
            for prop in suite.family(EXPERT_PARALLEL)
        }
    assert {name: v for name, v in verdicts.items() if isinstance(v, PropertyViolated)} == {}
    held = [name for name, v in verdicts.items() if isinstance(v, PropertyHeld)]
    assert len(held) == declared, held
