"""Ranks as processes: what goes wrong on one of them is found, told, and strands nobody."""

from collections.abc import Iterator

import pytest
from processes.conformance import planted

from equipoise.hal.conformance import ranked
from equipoise.hal.conformance.processes import ProcessSubject
from equipoise.hal.conformance.program import Case, Step, program
from equipoise.hal.conformance.property import Property
from equipoise.hal.conformance.search import Effort, Held, Violated, search
from equipoise.hal.errors import UsageError, Violation

CASE = Case(program([Step("sum", (7,))], size=2))


@pytest.fixture(scope="module")
def subject() -> Iterator[ProcessSubject]:
    made = ProcessSubject("cpu", "gloo", 2)
    yield made
    made.close()


def healthy(subject: ProcessSubject) -> bool:
    return isinstance(search(planted.SOUND, subject, Effort(cases=3)), Held)


def pids(subject: ProcessSubject) -> list[int]:
    subject.play(planted.PIDS, CASE)
    return planted.SEEN[-1]


def test_a_sound_property_holds_and_ranks_and_fabrics_are_kept(subject: ProcessSubject) -> None:
    assert search(planted.SOUND, subject, Effort(cases=20)) == Held(20)
    assert len(pids(subject)) == 2
    before = pids(subject)
    assert healthy(subject)
    assert pids(subject) == before


def test_a_wrong_answer_of_one_rank_is_found_and_shrunk(subject: ProcessSubject) -> None:
    verdict = search(planted.WRONG, subject, Effort(cases=50))
    assert isinstance(verdict, Violated)
    assert (verdict.clause, verdict.case.program.steps) == ("X4", (Step("sum", (5,)),))
    assert healthy(subject)


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        (planted.VIOLATING, "A4: rank 1: a guard band is gone"),
        (planted.RAISING, "X4: rank 1: raised ValueError: rank 1 was told to"),
    ],
)
def test_a_rank_that_fails_is_blamed_and_not_its_peer_that_waited_in_vain(
    subject: ProcessSubject, claim: Property, told: str
) -> None:
    before = pids(subject)
    with pytest.raises(Violation, match=told):
        subject.play(claim, CASE)
    assert healthy(subject)
    assert pids(subject) == before


def test_a_rank_that_dies_is_a_violation_and_is_replaced(subject: ProcessSubject) -> None:
    with pytest.raises(Violation, match="E1: rank 1 was killed by SIGKILL"):
        subject.play(planted.DYING, CASE)
    assert healthy(subject)


def test_a_rank_that_hangs_is_ended_with_its_stacks(
    subject: ProcessSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert healthy(subject)
    monkeypatch.setattr(ranked, "WATCHDOG", 1.0)
    with pytest.raises(Violation, match=r"C8: no answer within 2 s(?s:.*)in _hang"):
        subject.play(planted.HANGING, CASE)
    monkeypatch.undo()
    assert healthy(subject)


def test_answers_come_by_rank_and_by_host(subject: ProcessSubject) -> None:
    assert search(planted.HOSTS, subject, Effort(cases=3)) == Held(3)


def test_communicators_that_a_case_leaves_open_are_closed_before_the_next(
    subject: ProcessSubject,
) -> None:
    for _ in range(6):
        subject.play(planted.THREADS, CASE)
    assert planted.SEEN[-1] == planted.SEEN[-5]


def test_what_a_case_leaves_behind_is_counted(subject: ProcessSubject) -> None:
    subject.play(planted.LEAKING, CASE)  # the first use of everything makes the baseline
    with pytest.raises(Violation, match="R1: rank 0: after everything was closed there are 1 more"):
        subject.play(planted.LEAKING, CASE)
    assert healthy(subject)


def test_a_property_that_no_other_process_can_find_is_refused(subject: ProcessSubject) -> None:
    with pytest.raises(UsageError, match="nameless"):
        subject.play(planted.NAMELESS[0], CASE)
    assert healthy(subject)


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, (1,)), (2, (1, 2)), (4, (1, 2, 3, 4)), (6, (1, 2, 3, 4, 5, 6))]
)
def test_sizes_go_up_to_the_number_of_ranks(ranks: int, sizes: tuple[int, ...]) -> None:
    assert ProcessSubject("cpu", "gloo", ranks).traits.sizes == sizes
