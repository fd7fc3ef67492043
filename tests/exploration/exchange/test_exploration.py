"""The exchange on the virtual accelerator: hypothesis chooses who moves next."""

import os

import pytest
from exchanging.case import Case
from exchanging.play import play
from exchanging.strategies import cases
from hypothesis import HealthCheck, given, note, settings

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]
CASES = 5_000 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 250


@settings(max_examples=CASES, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_whoever_moves_next_every_step_equals_the_dense_reference_or_says_why_not(
    case: Case,
) -> None:
    note(repr(case))
    assert play(case) == {}
