"""The cadence that engines are told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.families import settings
from support.rebalancing import rebalance, violations


@given(st.integers(1, 5), st.integers(1, 5), st.integers(-3, 30))
def test_a_phase_is_a_number_of_sub_windows_within_the_interval(
    sub_window: int, windows: int, phase: int
) -> None:
    interval = sub_window * windows
    known = {"window_size": sub_window, "sub_window": sub_window, "step_interval": interval}
    if phase in range(0, interval, sub_window):
        assert settings(**known, phase=phase).phase == phase
        return
    with pytest.raises(ValueError, match=f"phase {phase} must be a multiple of sub_window"):
        settings(**known, phase=phase)


@pytest.mark.ranks
@pytest.mark.parametrize("phase", [0, 2, 4])
def test_epochs_open_one_step_behind_the_phase(phase: int) -> None:
    stories = rebalance(step_interval=6, phase=phase)
    assert violations(stories) == []
    opened = [report.opened for report in stories[0].reports]
    assert opened
    assert {(step - 1) % 6 for step in opened} == {phase}
    numbers = [report.number for report in stories[0].reports]
    assert len(set(numbers)) == len(numbers)
