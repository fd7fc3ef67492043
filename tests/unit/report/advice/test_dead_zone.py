"""The dead zone: its hinge, the exact fit to measured points, and what is taken by default."""

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from equipoise.hal.errors import FormatError
from equipoise.report.advice.dead_zone import DeadZone

RATIOS = st.lists(st.integers(100, 300), min_size=3, max_size=8, unique=True)


def error_of(zone: DeadZone, points: list[tuple[float, float]]) -> float:
    """Least sum of squares of a hinge of this knee and slope, over its flat time."""
    ratios, times = np.array(points).T
    factor = zone.factor(ratios)
    flat = float(factor @ times) / float(factor @ factor)
    return float(((times - flat * factor) ** 2).sum())


def test_step_time_is_flat_to_the_knee_and_a_line_above() -> None:
    zone = DeadZone(1.1, 0.5, "")
    assert [zone.factor(ratio) for ratio in (1.0, 1.1, 1.5)] == pytest.approx([1.0, 1.0, 1.2])
    by_layer = zone.factor(np.array([1.0, 1.5, np.nan]))
    assert by_layer[:2].tolist() == pytest.approx([1.0, 1.2])
    assert np.isnan(by_layer[2])


# Just above a point's ratio: almost as good a knee, but not the one.
@example([100, 101, 102, 220, 237, 238], 2.200061519072298, 1.0, 1.0)
@given(RATIOS, st.floats(1.0, 2.5), st.floats(0.05, 3.0), st.floats(1e-3, 1e3))
def test_fit_finds_the_hinge_that_points_lie_on(
    ratios: list[int], knee: float, slope: float, flat: float
) -> None:
    true = DeadZone(knee, slope, "")
    values = sorted(ratio / 100 for ratio in ratios)
    # Two points on each side, well apart, determine it.
    assume(values[1] < knee - 0.005 and knee + 0.005 < values[-2])
    zone = DeadZone.fit([(ratio, flat * true.factor(ratio)) for ratio in values])
    assert zone.knee == pytest.approx(knee, abs=1e-5)
    assert zone.slope == pytest.approx(slope, rel=1e-3)


@given(RATIOS, st.data())
def test_fit_is_no_worse_than_any_knee_of_a_grid(ratios: list[int], data: st.DataObject) -> None:
    times = [data.draw(st.floats(1.0, 2.0)) for _ in ratios]
    points = [(ratio / 100, time) for ratio, time in zip(ratios, times, strict=True)]
    try:
        zone = DeadZone.fit(points)
    except FormatError:
        assume(False)
    x, y = np.array(points).T
    least = error_of(zone, points)
    for knee in np.linspace(1.0, x.max(), 101):
        terms = np.stack([np.ones_like(x), np.maximum(0.0, x - knee)], axis=1)
        found, *_ = np.linalg.lstsq(terms, y, rcond=None)
        assert least <= ((y - terms @ found) ** 2).sum() + 1e-9


def test_fit_without_a_flat_piece_has_no_dead_zone() -> None:
    zone = DeadZone.fit([(1.3, 1.3), (2.0, 2.0), (3.0, 3.0)])
    assert zone.knee == 1.0
    assert zone.slope == pytest.approx(1.0)
    assert zone.source == "3 measured points"


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(1.0, 5.0), (1.5, 6.0)], "needs points of at least 3 different max/mean"),
        ([(1.0, 5.0), (1.5, 6.0), (1.5, 6.1)], "needs points of at least 3 different max/mean"),
        ([(1.0, 5.0), (1.5, 5.0), (2.0, 4.0)], "step time does not rise"),
        ([(1.0, 5.0), (1.5, 5.0), (2.0, 5.0)], "step time does not rise"),
        ([(0.9, 5.0), (1.5, 5.0), (2.0, 6.0)], "0.9:5 is not max/mean, at least 1"),
        ([(1.0, 5.0), (1.5, 0.0), (2.0, 6.0)], "1.5:0 is not max/mean"),
        ([(1.0, 5.0), (float("nan"), 5.0), (2.0, 6.0)], "nan:5 is not max/mean"),
    ],
)
def test_fit_refuses_points_that_are_no_hinge(
    points: list[tuple[float, float]], message: str
) -> None:
    with pytest.raises(FormatError, match=message) as raised:
        DeadZone.fit(points, "--dead-zone")
    assert str(raised.value).startswith("--dead-zone: ")
    assert "\n" not in str(raised.value)


def test_default_knee_grows_to_that_of_8_ranks_and_no_further() -> None:
    knees = [DeadZone.default(ranks).knee for ranks in (1, 2, 4, 8, 16, 320)]
    assert knees == sorted(knees)
    assert knees[2:4] == pytest.approx([1.032, 1.0905], abs=1e-4)
    assert knees[3] == knees[4] == knees[5]
    assert "not measured" not in DeadZone.default(8).source
    assert "not measured" in DeadZone.default(16).source


def test_default_gives_the_gain_of_rearranged_experts_on_a100() -> None:
    """OEPLB's A100 log: max/mean 1.715 as the experts come, 1.013 re-arranged; +21.8 % requests."""
    zone = DeadZone.default(8)
    assert zone.factor(1.715) / zone.factor(1.013) - 1 == pytest.approx(0.218, abs=0.01)
