"""Faults at random points of random programs: the survivors notice each, and continue."""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.backends.virtual import BACKEND, COMMUNICATOR
from equipoise.hal.conformance.executors.processes import ProcessSubject
from equipoise.hal.conformance.program import Case, Program, Step, make_program
from equipoise.hal.conformance.properties.faults import (
    FAULTS,
    MAX_STEPS,
    FaultPlan,
    RankFault,
    fault_plan,
    fault_programs,
)
from equipoise.hal.conformance.property import Traits
from equipoise.hal.errors import Violation

TRAITS = Traits(BACKEND.capabilities, COMMUNICATOR.capabilities, (1, 2, 4), True, True)
ALONE = Traits(BACKEND.capabilities, COMMUNICATOR.capabilities, (1, 2, 4), True)
SEND = Step("message", (3, 0, 1))


def plan_of(fault: RankFault, at: int = 1, victim: int = 0) -> FaultPlan:
    options = {"fault": fault.value, "victim": victim, "at": at, "window": 0}
    return fault_plan(make_program([SEND, SEND, SEND], 2, options))


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessSubject]:
    subject = ProcessSubject("cpu", "gloo", 3)
    yield subject
    subject.close()


def violation(subject: ProcessSubject, case: Case) -> Violation | None:
    try:
        subject.play(FAULTS, case)
    except Violation as found:
        return found
    return None


@pytest.mark.parametrize("fault", list(RankFault))
def test_fault_on_process_ranks_ends_only_dependents(
    processes: ProcessSubject, fault: RankFault
) -> None:
    steps = [Step("all_reduce", (2, 0, 0)), Step("exchange", (5, 0, 0)), SEND]
    options = {"fault": fault.value, "victim": 1, "at": 1, "window": MAX_STEPS}
    assert violation(processes, Case(make_program(steps, 3, options))) is None


@given(st.data())
def test_fault_programs_name_existing_ranks(data: st.DataObject) -> None:
    program = data.draw(fault_programs(TRAITS))
    plan = fault_plan(program)
    assert 2 <= program.size <= 4
    assert plan.victim < program.size
    assert plan.step < len(plan.steps)
    for step in program.steps:
        _, first, second = map(int, step.args)
        assert first != second
        assert max(first, second) < program.size


@given(fault_programs(ALONE))
def test_fault_programs_end_no_irreplaceable_rank(program: Program) -> None:
    plan = fault_plan(program)
    assert plan.fault in (RankFault.DELAY, RankFault.DROP)
    assert plan.lost == frozenset()


def test_fault_plan_drop_excuses_only_last_step() -> None:
    plan = plan_of(RankFault.DROP)
    assert len(plan.steps) == 2
    assert [plan.never_comes(number) for number in range(2)] == [False, True]
    assert [plan.may_fail(number) for number in range(2)] == [False, True]


@pytest.mark.parametrize("fault", [RankFault.KILL, RankFault.STOP])
def test_fault_plan_lost_rank_excuses_all_later_steps(fault: RankFault) -> None:
    plan = plan_of(fault)
    assert plan.lost == {0}
    assert [plan.never_comes(number) for number in range(3)] == [False, True, True]
    assert all(plan.may_fail(number) for number in range(3))


def test_fault_plan_delay_requires_every_step() -> None:
    plan = plan_of(RankFault.DELAY)
    assert not any(plan.never_comes(n) or plan.may_fail(n) for n in range(3))


def test_fault_programs_draw_every_fault() -> None:
    fault_counts: Counter[RankFault] = Counter()

    # Few of a hundred programs drop a message: in one draw four did.
    @settings(max_examples=300, derandomize=True, database=None)
    @given(fault_programs(TRAITS))
    def draw(program: Program) -> None:
        fault_counts[fault_plan(program).fault] += 1

    draw()
    assert min(fault_counts[fault] for fault in RankFault) >= 5, fault_counts
