"""Channels on the virtual accelerator: hypothesis chooses who moves next, and what goes wrong."""

import pytest
from exploration.channel.case import FAULTS, Case, Fault, Making, Manner
from exploration.channel.oracle import violations
from exploration.channel.play import play
from exploration.channel.search import cases
from helpers.strategies.drawing import each_of
from helpers.tiers import DEEP
from hypothesis import given, note, settings

pytestmark = pytest.mark.timeout(1800)
CASES = 20_000 if DEEP else 300


@settings(max_examples=CASES)
@given(cases((Fault.NONE,)))
def test_whatever_is_late_every_step_is_read_as_it_was_sent(case: Case) -> None:
    note(str(case))
    assert violations(case, play(case)) == {}


@settings(max_examples=CASES)
@given(cases(FAULTS))
def test_whatever_goes_wrong_nothing_else_is_read_unless_the_reader_is_told(case: Case) -> None:
    note(str(case))
    assert violations(case, play(case)) == {}


def test_a_case_is_played_alike_each_time() -> None:
    seen: list[tuple[Case, str]] = []
    each_of(cases(FAULTS), 20, lambda case: seen.append((case, repr(play(case)))))
    assert [repr(play(case)) for case, _ in seen] == [record for _, record in seen]


def test_the_exploration_comes_to_every_fault_manner_and_way_of_reading() -> None:
    seen: list[Case] = []
    each_of(cases(FAULTS), 300, seen.append)
    assert {case.fault for case in seen} == set(FAULTS)
    assert {manner for case in seen for manner in case.manners} == set(Manner)
    assert {making for case in seen for making in case.makings} == set(Making)
    assert {(case.parts, case.reading) for case in seen} >= {(1, "host"), (2, "stream")}


def test_faults_are_noticed_by_reads_and_by_hosts() -> None:
    told: set[str] = set()

    def tell(case: Case) -> None:
        record = play(case)
        told.update("host" for _ in record.errors)
        told.update("read" for sight in record.sights if sight.errors)

    each_of(cases(FAULTS), 100, tell)
    assert told == {"host", "read"}
