import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.sub_windows import SubWindows

COUNTS = st.integers(1, 5)


@given(every=COUNTS, in_window=COUNTS, more=st.integers(0, 6), step=st.integers(0, 200))
def test_the_next_boundary_with_something_to_do_is_the_first_that_has(
    every: int, in_window: int, more: int, step: int
) -> None:
    parts = SubWindows(every, every * in_window, every * (in_window + more))
    something = next(n for n in range(step + 1, step + 1000) if parts.ends(n) or parts.opens(n))
    assert parts.following(step) == something


@given(every=COUNTS, in_window=COUNTS, more=st.integers(0, 6), number=st.integers(1, 20))
def test_a_plan_finds_exactly_the_sub_windows_of_the_window_before_it(
    every: int, in_window: int, more: int, number: int
) -> None:
    window, period = every * in_window, every * (in_window + more)
    parts = SubWindows(every, window, period)
    due = number * period
    ends = [step for step in range(due - period + 1, due + 1) if parts.ends(step)]
    assert ends == list(range(due - window + every, due + 1, every))
    cleared = parts.opens(due - window) or parts.ends(due - window) or due == window
    assert cleared, "what was counted before the window is in its first sum"


@pytest.mark.parametrize(
    ("numbers", "why"),
    [((3, 4, 6), "not made of"), ((2, 4, 7), "not made of"), ((2, 4, 2), "overlap")],
)
def test_windows_that_cannot_be_are_refused(numbers: tuple[int, int, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SubWindows(*numbers)
