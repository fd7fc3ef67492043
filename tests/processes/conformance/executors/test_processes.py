"""Ranks as processes: a failure on one is found and reported, and strands no other."""

from collections.abc import Iterator

import pytest
from processes.conformance import planted_properties as planted

from equipoise.hal.conformance.executors import multi_rank
from equipoise.hal.conformance.executors.processes import ProcessSubject
from equipoise.hal.conformance.program import Case, Step, make_program
from equipoise.hal.conformance.property import Property
from equipoise.hal.conformance.search import PropertyHeld, PropertyViolated, SearchSettings, search
from equipoise.hal.errors import UsageError, Violation

CASE = Case(make_program([Step("sum", (7,))], size=2))


@pytest.fixture(scope="module")
def subject() -> Iterator[ProcessSubject]:
    process_subject = ProcessSubject("cpu", "gloo", 2)
    yield process_subject
    process_subject.close()


def healthy(subject: ProcessSubject) -> bool:
    return isinstance(search(planted.SOUND, subject, SearchSettings(cases=3)), PropertyHeld)


def pids(subject: ProcessSubject) -> list[int]:
    subject.play(planted.PIDS, CASE)
    return planted.JUDGED_ANSWERS[-1]


def test_process_subject_keeps_ranks_between_cases(subject: ProcessSubject) -> None:
    assert search(planted.SOUND, subject, SearchSettings(cases=20)) == PropertyHeld(20)
    assert len(pids(subject)) == 2
    before = pids(subject)
    assert healthy(subject)
    assert pids(subject) == before


def test_process_subject_finds_and_shrinks_wrong_answer(subject: ProcessSubject) -> None:
    verdict = search(planted.WRONG, subject, SearchSettings(cases=50))
    assert isinstance(verdict, PropertyViolated)
    assert (verdict.clause, verdict.case.program.steps) == ("X4", (Step("sum", (5,)),))
    assert healthy(subject)


@pytest.mark.parametrize(
    ("prop", "pattern"),
    [
        (planted.VIOLATING, "A4: rank 1: a guard band is gone"),
        (planted.RAISING, "X4: rank 1: raised ValueError: rank 1 was told to"),
    ],
)
def test_process_subject_blames_failing_rank_not_waiting_peer(
    subject: ProcessSubject, prop: Property, pattern: str
) -> None:
    before = pids(subject)
    with pytest.raises(Violation, match=pattern):
        subject.play(prop, CASE)
    assert healthy(subject)
    assert pids(subject) == before


def test_process_subject_replaces_dead_rank(subject: ProcessSubject) -> None:
    with pytest.raises(Violation, match="E1: rank 1 was killed by SIGKILL"):
        subject.play(planted.DYING, CASE)
    assert healthy(subject)


def test_process_subject_ends_hanging_rank_with_stacks(
    subject: ProcessSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert healthy(subject)
    monkeypatch.setattr(multi_rank, "WATCHDOG", 1.0)
    with pytest.raises(Violation, match=r"C8: no answer within 2 s(?s:.*)in _hang"):
        subject.play(planted.HANGING, CASE)
    monkeypatch.undo()
    assert healthy(subject)


def test_process_subject_orders_answers_by_rank_and_host(subject: ProcessSubject) -> None:
    assert search(planted.HOSTS, subject, SearchSettings(cases=3)) == PropertyHeld(3)


def test_process_subject_closes_communicators_between_cases(
    subject: ProcessSubject,
) -> None:
    for _ in range(6):
        subject.play(planted.THREADS, CASE)
    assert planted.JUDGED_ANSWERS[-1] == planted.JUDGED_ANSWERS[-5]


def test_process_subject_detects_leaked_descriptors(subject: ProcessSubject) -> None:
    subject.play(planted.LEAKING, CASE)  # the first use of everything makes the baseline
    with pytest.raises(Violation, match="R1: rank 0: after everything was closed there are 1 more"):
        subject.play(planted.LEAKING, CASE)
    assert healthy(subject)


def test_process_subject_refuses_unfindable_property(subject: ProcessSubject) -> None:
    with pytest.raises(UsageError, match="nameless"):
        subject.play(planted.NAMELESS[0], CASE)
    assert healthy(subject)


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, (1,)), (2, (1, 2)), (4, (1, 2, 3, 4)), (6, (1, 2, 3, 4, 5, 6))]
)
def test_process_subject_sizes_reach_rank_count(ranks: int, sizes: tuple[int, ...]) -> None:
    assert ProcessSubject("cpu", "gloo", ranks).traits.group_sizes == sizes
