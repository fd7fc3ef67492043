"""The exchange on the virtual accelerator: hypothesis chooses who moves next."""

import pytest
from exploration.exchange.case import Case
from exploration.exchange.run_case import play
from exploration.exchange.strategies import cases
from helpers.records import RecordProperty, add_row
from helpers.tiers import DEEP
from hypothesis import HealthCheck, given, note, settings

pytestmark = pytest.mark.timeout(900)
CASES = 5_000 if DEEP else 250


def test_exchange_matches_dense_reference_under_any_schedule(
    record_property: RecordProperty,
) -> None:
    count = 0

    @settings(max_examples=CASES, suppress_health_check=[HealthCheck.too_slow])
    @given(cases())
    def played(case: Case) -> None:
        nonlocal count
        note(repr(case))
        assert play(case) == {}
        count += 1

    played()
    cells = {"of": "exchange", "cases": "with limits and other generations", "played": count}
    add_row(record_property, "interleavings", cells)
