"""Channels on the virtual accelerator: hypothesis chooses who moves next, and what goes wrong."""

from collections import Counter

import pytest
from exploration.channel.case import FAULTS, Case, Fault, Making, Manner
from exploration.channel.oracle import violations
from exploration.channel.run_case import Record, play
from exploration.channel.search import cases
from helpers.records import RecordProperty, add_row
from helpers.strategies.hypothesis_examples import each_of
from helpers.tiers import DEEP
from hypothesis import given, note, settings

pytestmark = pytest.mark.timeout(1800)
CASES = 20_000 if DEEP else 300


def played(faults: tuple[Fault, ...]) -> dict[Fault, Counter[str]]:
    """Plays of cases that break no property, by what went wrong and how they ended."""
    outcomes_by_fault: dict[Fault, Counter[str]] = {fault: Counter() for fault in faults}

    @settings(max_examples=CASES)
    @given(cases(faults))
    def play_one(case: Case) -> None:
        note(str(case))
        record = play(case)
        assert violations(case, record) == {}
        outcomes_by_fault[case.fault][outcome_of(record)] += 1

    play_one()
    return outcomes_by_fault


OUTCOMES = ("read as sent", "reported")


def outcome_of(record: Record) -> str:
    """Whether anybody was told that something is wrong."""
    errors_reported = record.errors or any(
        observation.errors for observation in record.observations
    )
    return "reported" if errors_reported else "read as sent"


def outcome_cells(outcomes: Counter[str]) -> dict[str, int]:
    """Cells of a row of docs/deep-results.md."""
    return {"played": outcomes.total(), **{name: outcomes[name] for name in OUTCOMES}}


def test_channel_steps_are_read_as_sent_under_any_schedule(
    record_property: RecordProperty,
) -> None:
    outcomes = played((Fault.NONE,))
    cells = {
        "of": "channel",
        "cases": "ranks and streams are late",
        **outcome_cells(outcomes[Fault.NONE]),
    }
    add_row(record_property, "interleavings", cells)


def test_channel_reader_gets_sent_steps_or_an_error_under_faults(
    record_property: RecordProperty,
) -> None:
    outcomes_by_fault = played(FAULTS)
    total = outcome_cells(sum(outcomes_by_fault.values(), Counter()))
    add_row(record_property, "interleavings", {"of": "channel", "cases": "with faults", **total})
    for fault, outcomes in outcomes_by_fault.items():
        cells = {"of": "channel", "fault": fault.value, **outcome_cells(outcomes)}
        add_row(record_property, "faults explored", cells)


def test_channel_exploration_replays_case_deterministically() -> None:
    records: list[tuple[Case, str]] = []
    each_of(cases(FAULTS), 20, lambda case: records.append((case, repr(play(case)))))
    assert [repr(play(case)) for case, _ in records] == [record for _, record in records]


def test_channel_exploration_reaches_every_fault_and_reading_mode() -> None:
    played_cases: list[Case] = []
    each_of(cases(FAULTS), 300, played_cases.append)
    assert {case.fault for case in played_cases} == set(FAULTS)
    assert {manner for case in played_cases for manner in case.manners} == set(Manner)
    assert {making for case in played_cases for making in case.makings} == set(Making)
    assert {(case.parts, case.reading) for case in played_cases} >= {(1, "host"), (2, "stream")}


def test_channel_exploration_faults_reach_reads_and_hosts() -> None:
    receivers: set[str] = set()

    def tell(case: Case) -> None:
        record = play(case)
        receivers.update("host" for _ in record.errors)
        receivers.update("read" for observation in record.observations if observation.errors)

    each_of(cases(FAULTS), 100, tell)
    assert receivers == {"host", "read"}
