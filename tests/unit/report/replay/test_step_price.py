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
    SlotOdds,
    mean_of_layers,
    step_imbalance,
)

LAYERS, RANKS = 2, 4


def rows(*steps: list[list[int]]) -> np.ndarray:
    return np.array(steps, np.float32)


def one_slot_an_expert(counts: np.ndarray, ranks: int = RANKS) -> SlotOdds:
    layers, experts = counts.shape[1:]
    placement = np.tile(np.arange(experts, dtype=np.int32), (layers, 1))
    return SlotOdds(counts, placement, np.ones((layers, experts), np.float32), ranks)


def test_imbalance_leaves_out_layers_without_rows() -> None:
    uneven = step_imbalance(rows([[4, 0, 0, 0], [0, 0, 0, 0]], [[2, 2, 2, 2], [4, 4, 0, 0]]))
    assert uneven[0, 0] == 3.0
    assert np.isnan(uneven[0, 1])
    assert mean_of_layers(uneven).tolist() == [3.0, 0.5]


def test_dead_zone_prices_steps_by_mean_imbalance_above_its_knee() -> None:
    price = DeadZonePrice(DeadZone(1.5, 2.0, "test"))
    uneven = rows([[2, 2, 2, 2], [3, 1, 2, 2]], [[8, 0, 0, 0], [8, 0, 0, 0]])
    times = price.steps(uneven, one_slot_an_expert(np.zeros((2, 2, RANKS), np.int32)))
    assert times.tolist() == [1.0, 1.0 + 2.0 * (4.0 - 1.5)]


def test_slot_is_active_where_a_row_of_its_expert_comes() -> None:
    """An expert with one replica surely, one of two with the chance that not all rows miss it."""
    counts = np.array([[[3, 0, 1]], [[0, 2, 0]]], np.int32)
    placement = np.array([[0, 1, 2, 0]], np.int32)
    odds = SlotOdds(counts, placement, np.array([[0.25, 1, 1, 0.75]], np.float32), 2)
    found = odds.active(1.0)
    assert found[0, 0] == pytest.approx([1 - 0.75**3, 1 + 1 - 0.25**3])
    assert found[1, 0] == pytest.approx([1, 0])
    assert odds.active(0.5)[1, 0] == pytest.approx([1 - 0.5**2, 0])


def test_active_slots_are_those_of_each_step_by_itself() -> None:
    """Also where there are too many for one piece: what alternates is not averaged."""
    counts = np.zeros((600, 58, 64), np.int32)
    counts[::2, :, ::2], counts[1::2, :, 1::2] = 8, 8
    found = one_slot_an_expert(counts, 8).active(1.0)
    assert found == pytest.approx(np.full((600, 58, 8), 4.0))


def test_roofline_prices_a_step_as_advise_does() -> None:
    """With so many rows that every expert is active in both."""
    shape = ExpertShape(LAYERS, 8, 8, RANKS)
    chances = np.random.default_rng(0)
    counts = chances.integers(0, 3000, (1, LAYERS, 8))
    placement = np.tile(np.arange(8, dtype=np.int32), (LAYERS, 1))
    roofline = Roofline(Expert.of_dimensions(4096, 1536, "fp8"), find_hardware("h200"))
    layout = ExpertPlacement.with_even_shares(placement, RANKS, (0, 1))
    expected = roofline.layers(ExpertStatistics(counts, (0, 1)), layout, 1.0).sum()
    by_rank = counts.reshape(1, LAYERS, RANKS, -1).sum(axis=3).astype(np.float32)
    times = RooflinePrice(roofline).steps(by_rank, one_slot_an_expert(counts.astype(np.int32)))
    assert times[0] == pytest.approx(expected, rel=1e-6)
    assert shape.slots_per_rank == 2


def test_roofline_of_half_a_batch_computes_half_the_rows() -> None:
    roofline = Roofline(Expert.of_dimensions(4096, 1536, "fp8"), find_hardware("h200"))
    many = rows([[10**6] * RANKS] * LAYERS)
    slots = one_slot_an_expert(np.full((1, LAYERS, 8), 500_000, np.int32))
    whole, half = (RooflinePrice(roofline, batch).steps(many, slots)[0] for batch in (1.0, 0.5))
    assert half == pytest.approx(whole / 2)


def test_step_without_rows_has_no_time() -> None:
    roofline = Roofline(Expert.of_dimensions(4096, 1536, "fp8"), find_hardware("h200"))
    empty = one_slot_an_expert(np.zeros((1, LAYERS, 8), np.int32))
    times = RooflinePrice(roofline).steps(np.zeros((1, LAYERS, RANKS), np.float32), empty)
    assert np.isnan(times[0])
