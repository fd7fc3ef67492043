import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.load_window import WindowSchedule

COUNTS = st.integers(1, 5)
MORE = st.integers(0, 6)


@given(
    every=COUNTS,
    in_window=COUNTS,
    more=MORE,
    phase=st.integers(0, 9),
    first=st.integers(0, 50),
    step=st.integers(0, 200),
)
def test_sub_windows_following_is_next_boundary_with_work(
    every: int, in_window: int, more: int, phase: int, first: int, step: int
) -> None:
    window, period = every * in_window, every * (in_window + more)
    schedule = WindowSchedule(every, window, period, every * phase, first)
    next_event_step = next(
        n for n in range(step + 1, step + 1000) if schedule.ends(n) or schedule.starts(n)
    )
    assert schedule.next_event(step) == next_event_step


@given(
    every=COUNTS, in_window=COUNTS, more=MORE, phase=st.integers(0, 9), number=st.integers(1, 20)
)
def test_sub_windows_of_a_plan_cover_exactly_its_window(
    every: int, in_window: int, more: int, phase: int, number: int
) -> None:
    window, period = every * in_window, every * (in_window + more)
    schedule = WindowSchedule(every, window, period, every * phase)
    plan_step = number * period + every * phase
    end_steps = [
        step for step in range(plan_step - period + 1, plan_step + 1) if schedule.ends(step)
    ]
    assert end_steps == list(range(plan_step - window + every, plan_step + 1, every))
    is_cleared = (
        schedule.starts(plan_step - window)
        or schedule.ends(plan_step - window)
        or plan_step == window
    )
    assert is_cleared, "what was counted before the window is in its first sum"


@given(every=COUNTS, in_window=COUNTS, more=MORE, first=st.integers(0, 50))
def test_sub_windows_sum_only_whole_ones_from_the_first_step_on(
    every: int, in_window: int, more: int, first: int
) -> None:
    schedule = WindowSchedule(every, every * in_window, every * (in_window + more), 0, first)
    step_count = 0
    for step in range(first, first + 100):
        if schedule.ends(step):
            assert step_count == every
        if schedule.ends(step) or schedule.starts(step):
            step_count = 0
        step_count += 1


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((3, 4, 6, 0), "made of"),
        ((2, 4, 7, 0), "made of"),
        ((2, 4, 8, 3), "made of"),
        ((2, 4, 2, 0), "overlap"),
    ],
)
def test_sub_windows_refuse_impossible_numbers(
    numbers: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        WindowSchedule(*numbers)
