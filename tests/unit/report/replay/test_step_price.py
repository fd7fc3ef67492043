"""What a step costs: by a dead zone, and by the roofline."""

import numpy as np
import pytest

from equipoise.balancer.experts.placement import ExpertShape
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.statistics import ExpertStatistics
from equipoise.report.advice.dead_zone import DeadZone
from equipoise.report.advice.hardware import Expert, Roofline, find_hardware
from equipoise.report.replay.step_price import (
    DeadZonePrice,
    RooflinePrice,
    mean_of_layers,
    step_imbalance,
)

LAYERS, RANKS = 2, 4


def rows(*steps: list[list[int]]) -> np.ndarray:
    return np.array(steps, np.float32)


def test_imbalance_leaves_out_layers_without_rows() -> None:
    uneven = step_imbalance(rows([[4, 0, 0, 0], [0, 0, 0, 0]], [[2, 2, 2, 2], [4, 4, 0, 0]]))
    assert uneven[0, 0] == 3.0
    assert np.isnan(uneven[0, 1])
    assert mean_of_layers(uneven).tolist() == [3.0, 0.5]


def test_dead_zone_prices_steps_by_mean_imbalance_above_its_knee() -> None:
    price = DeadZonePrice(DeadZone(1.5, 2.0, "test"))
    times = price.steps(
        rows([[2, 2, 2, 2], [3, 1, 2, 2]], [[8, 0, 0, 0], [8, 0, 0, 0]]), np.ones(1)
    )
    assert times.tolist() == [1.0, 1.0 + 2.0 * (4.0 - 1.5)]


def test_roofline_prices_a_step_as_advise_does() -> None:
    """Of one step, the rows of slots are those of the mean step."""
    shape = ExpertShape(LAYERS, 8, 8, RANKS)
    chances = np.random.default_rng(0)
    counts = chances.integers(0, 3000, (1, LAYERS, 8))
    placement = np.tile(np.arange(8, dtype=np.int32), (LAYERS, 1))
    roofline = Roofline(Expert.of_dimensions(4096, 1536, "fp8"), find_hardware("h200"))
    layout = ExpertPlacement.with_even_shares(placement, RANKS, (0, 1))
    expected = roofline.layers(ExpertStatistics(counts, (0, 1)), layout, 1.0).sum()
    by_rank = counts.reshape(1, LAYERS, RANKS, -1).sum(axis=3).astype(np.float32)
    times = RooflinePrice(roofline).steps(by_rank, counts[0].astype(np.float64))
    assert times[0] == pytest.approx(expected, rel=1e-6)
    assert shape.slots_per_rank == 2


def test_roofline_of_half_a_batch_computes_half_the_rows() -> None:
    roofline = Roofline(Expert.of_dimensions(4096, 1536, "fp8"), find_hardware("h200"))
    many = rows([[10**6] * RANKS] * LAYERS)
    slots = np.full((LAYERS, 8), 5e5)
    whole, half = (RooflinePrice(roofline, batch).steps(many, slots)[0] for batch in (1.0, 0.5))
    assert half == pytest.approx(whole / 2)


def test_step_without_rows_has_no_time() -> None:
    roofline = Roofline(Expert.of_dimensions(4096, 1536, "fp8"), find_hardware("h200"))
    times = RooflinePrice(roofline).steps(
        np.zeros((1, LAYERS, RANKS), np.float32), np.zeros((2, 8))
    )
    assert np.isnan(times[0])
