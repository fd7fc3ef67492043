"""The race table as a mutation test of the simulator: it catches bugs, and spoils nothing right."""

import pytest
from npusim.selftest import races

RIGHT = {"a/right": races.ROUNDS, "a/wrong": 0}


@pytest.fixture(scope="module")
def table() -> dict[str, races.CorrectRounds]:
    """The table of this machine."""
    return races.measure()


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_simulator_catches_every_race_and_passes_right_programs(
    table: dict[str, races.CorrectRounds], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\n{races.table(table)}")
    assert races.violations(table) == []


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_race_table_has_six_lazy_and_four_explore_races(
    table: dict[str, races.CorrectRounds],
) -> None:
    assert len([case for case in table["lazy"] if case.endswith("/wrong")]) == 6
    assert len([case for case in table["explore"] if case.endswith("/wrong")]) == 4


def test_race_violations_are_empty_for_expected_table() -> None:
    assert races.violations({"lazy": RIGHT, "eager": {"a/right": 20, "a/wrong": 20}}) == []


@pytest.mark.parametrize(
    ("schedule", "case", "correct"),
    [
        ("eager", "a/right", 19),
        ("lazy", "a/right", 19),
        ("lazy", "a/wrong", 1),
        ("delay", "a/wrong", 20),
        ("explore", "a/wrong", 20),
    ],
)
def test_race_violations_name_unexpected_result(schedule: str, case: str, correct: int) -> None:
    assert races.violations({schedule: {**RIGHT, case: correct}}) == [
        f"{case} under {schedule}: {correct} of 20 correct"
    ]
