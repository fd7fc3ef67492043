"""Figures that the aggregator derives from events."""

import math

import numpy as np
import pytest
from helpers.strategies.engine_events import (
    SHAPE,
    SLOT_BYTES,
    SUB_WINDOW,
    load_reduced,
    placements,
    rebalance_ended,
    rows,
    state_changed,
    steps,
)
from hypothesis import given
from hypothesis import strategies as st

from equipoise import _native
from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, Layout, imbalance
from equipoise.balancer.experts.runtime.events import (
    BalanceMeasured,
    BatchBalanceMeasured,
    BatchSampled,
    EngineClosed,
    Event,
    RebalanceMeasured,
    StepStalled,
)
from equipoise.balancer.observe.aggregator import (
    MIN_BASELINE_STEPS,
    EventAggregator,
    measure_balance,
    rank_loads,
    slots_received,
)


def read(*entries: Event) -> list[Event]:
    aggregator = EventAggregator()
    return [derived_event for event in entries for derived_event in aggregator.process(event)]


def rebalance_measurements(*entries: Event) -> list[RebalanceMeasured]:
    return [event for event in read(*entries) if isinstance(event, RebalanceMeasured)]


def test_balancedness_sums_layers_and_imbalance_averages_them() -> None:
    # Slots hold 0 1 2 | 2 3 0, so experts 0 and 2 have a copy on each rank.
    load = np.array([[10, 20, 10, 40], [0, 100, 0, 100]], dtype=np.int64)
    balance = measure_balance(load_reduced(8, load))
    assert balance.balancedness == pytest.approx((40 + 100) / (50 + 100))
    assert balance.imbalance == pytest.approx((50 / 40 - 1 + 0.0) / 2)
    assert balance.mean_rows == pytest.approx(140 / SUB_WINDOW)
    assert balance.max_rows == pytest.approx(150 / SUB_WINDOW)


def test_balance_ignores_layers_without_rows() -> None:
    load = np.array([[10, 20, 10, 40], [0, 0, 0, 0]], dtype=np.int64)
    assert measure_balance(load_reduced(8, load)).imbalance == pytest.approx(50 / 40 - 1)
    nothing = measure_balance(load_reduced(8, rows(0, 0, 0, 0)))
    assert math.isnan(nothing.imbalance)
    assert math.isnan(nothing.balancedness)


@given(st.lists(st.integers(0, 10**6), min_size=4, max_size=4).filter(lambda load: sum(load) > 0))
def test_balance_imbalance_equals_planner_imbalance(load: list[int]) -> None:
    event = load_reduced(8, rows(*load))
    planner_imbalance = imbalance(event.load, event.layout, SHAPE).mean() / SHARE_ONE
    assert measure_balance(event).imbalance == pytest.approx(planner_imbalance, abs=2e-4, rel=1e-2)


def test_balance_uses_shares_applied_by_router() -> None:
    event = load_reduced(8, rows(60, 0, 0, 20))
    applied_shares = np.array(
        [[SHARE_ONE, SHARE_ONE, SHARE_ONE, 0, SHARE_ONE, 0]] * 2, dtype=np.int32
    )
    even_balance = measure_balance(event)
    applied_balance = measure_balance(
        type(event)(8, SUB_WINDOW, event.load, event.layout, SHAPE, lambda *_: applied_shares)
    )
    loads = rank_loads(event.load, Layout(event.layout.placement, applied_shares), SHAPE)
    assert loads.tolist() == [[60.0, 20.0]] * 2
    assert applied_balance.imbalance == pytest.approx(0.5)
    assert even_balance.imbalance == pytest.approx(0.25)


def batch_sampled(counts: list[list[int]], routed: list[int]) -> BatchSampled:
    """A sample of two ranks' rows by expert, alike in every layer, and of the rows by rank."""
    batches = np.array(counts, dtype=np.int32)[:, None, :].repeat(SHAPE.layers, axis=1)
    rank_rows = np.array([routed] * SHAPE.layers, dtype=np.int64)
    layout = load_reduced(8, rows(1, 1, 1, 1)).layout
    return BatchSampled(7, batches, layout, SHAPE, lambda *_: rank_rows)


def test_batch_balance_is_of_routed_rows_and_of_rows_without_levelling() -> None:
    # Slots hold 0 1 2 | 2 3 0: all rows of expert 1 are on the first rank, however they are drawn.
    (event,) = read(batch_sampled([[0, 3, 0, 0], [0, 5, 0, 0]], routed=[5, 3]))
    assert isinstance(event, BatchBalanceMeasured)
    assert (event.step, event.imbalance, event.unlevelled_imbalance) == (7, 0.25, 1.0)


def test_batch_balance_of_step_without_rows_is_nan() -> None:
    (event,) = read(batch_sampled([[0, 0, 0, 0]], routed=[0, 0]))
    assert isinstance(event, BatchBalanceMeasured)
    assert math.isnan(event.imbalance)
    assert math.isnan(event.unlevelled_imbalance)


@given(st.data())
def test_slots_received_of_all_ranks_equal_native_move_count(data: st.DataObject) -> None:
    ranks, per, layers = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4), st.just(2)))
    slots = ranks * per
    shape = ExpertShape(layers, experts=1 if slots < 3 else 3, slots=slots, ranks=ranks)
    draw = st.lists(st.integers(0, shape.experts - 1), min_size=slots, max_size=slots)
    before, after = (
        np.array([data.draw(draw) for _ in range(layers)], dtype=np.int32) for _ in range(2)
    )
    assert sum(slots_received(before, before, rank, shape) for rank in range(ranks)) == 0
    received_counts = [slots_received(before, after, rank, shape) for rank in range(ranks)]
    assert sum(received_counts) == _native.count_moves(before, after, ranks)


def test_rebalance_is_settled_by_first_sub_window_after_its_end() -> None:
    load, straddling_sub_window, later_step = (
        rows(10, 20, 10, 40),
        load_reduced(10, rows(1, 1, 1, 1)),
        11,
    )
    aggregator = EventAggregator()
    assert aggregator.process(rebalance_ended(rank=0, ended_at=9)) == ()
    assert [type(event) for event in aggregator.process(straddling_sub_window)] == [BalanceMeasured]
    balance, measurement = aggregator.process(load_reduced(later_step, load))
    assert isinstance(balance, BalanceMeasured)
    assert isinstance(measurement, RebalanceMeasured)
    assert measurement.record.actual_imbalance == balance.imbalance
    assert measurement.record.bytes_received == SLOT_BYTES
    assert [type(event) for event in aggregator.process(load_reduced(13, load))] == [
        BalanceMeasured
    ]


def test_rebalance_without_copies_does_not_hide_outcome_of_earlier_one() -> None:
    measurements = rebalance_measurements(
        rebalance_ended(ended_at=9),
        rebalance_ended(number=4, ended_at=11, copies=0),
        load_reduced(14, rows(1, 1, 1, 1)),
    )
    assert [event.record.number for event in measurements] == [3, 4]
    assert [event.record.actual_imbalance for event in measurements] == pytest.approx([0.0, 0.0])


def test_rebalance_outcome_is_unknown_when_next_rebalance_moved_first() -> None:
    measurements = rebalance_measurements(
        rebalance_ended(ended_at=9),
        rebalance_ended(number=4, ended_at=11),
        load_reduced(14, rows(1, 1, 1, 1)),
    )
    assert [event.record.number for event in measurements] == [3, 4]
    assert measurements[0].record.actual_imbalance is None
    assert measurements[1].record.actual_imbalance == pytest.approx(0.0)


def test_rank_without_slots_received_copied_zero_bytes() -> None:
    (measurement,) = rebalance_measurements(rebalance_ended(rank=1), EngineClosed())
    assert measurement.record.bytes_received == 0
    assert slots_received(*placements(), 0, SHAPE) == 1


def test_aborted_rebalance_is_settled_at_once() -> None:
    (measurement,) = rebalance_measurements(rebalance_ended(outcome="plans differ"))
    assert measurement.record.outcome == "plans differ"
    assert measurement.record.actual_imbalance is None


@pytest.mark.parametrize(
    "last", [EngineClosed(), rebalance_ended(number=4, outcome="plans differ")]
)
def test_rebalance_is_settled_without_later_sub_window(last: Event) -> None:
    measurements = rebalance_measurements(rebalance_ended(), last)
    assert measurements[0].record.number == 3
    assert measurements[0].record.actual_imbalance is None


def test_stall_is_step_time_above_median_outside_rebalances() -> None:
    outside = [state_changed("idle"), *steps(0, *[1.0] * MIN_BASELINE_STEPS, 9.0)]
    inside = [state_changed("planning", 3), *steps(6, 1.5, 0.5, 2.0)]
    events = read(*outside, *inside, rebalance_ended(), EngineClosed())
    stalls = [event.seconds for event in events if isinstance(event, StepStalled)]
    assert stalls == pytest.approx([0.5, 1.0])
    (measurement,) = [event for event in events if isinstance(event, RebalanceMeasured)]
    assert measurement.record.stall_seconds == pytest.approx(1.5)


def test_rebalance_without_stall_has_zero_stall() -> None:
    outside = [state_changed("idle"), *steps(0, *[1.0] * MIN_BASELINE_STEPS)]
    (measurement,) = rebalance_measurements(
        *outside, state_changed("planning", 3), *steps(6, 0.5), rebalance_ended(), EngineClosed()
    )
    assert measurement.record.stall_seconds == 0.0


def test_stall_median_excludes_draining_steps() -> None:
    outside = [state_changed("idle"), *steps(0, *[1.0] * MIN_BASELINE_STEPS)]
    draining_events = [state_changed("draining"), *steps(6, *[50.0] * 9), state_changed("idle")]
    events = read(*outside, *draining_events, state_changed("planning", 3), *steps(15, 3.0))
    assert [event.seconds for event in events if isinstance(event, StepStalled)][-1] == 2.0


def test_stall_is_unknown_before_enough_baseline_steps() -> None:
    few = [state_changed("idle"), *steps(0, *[1.0] * (MIN_BASELINE_STEPS - 1))]
    (measurement,) = rebalance_measurements(
        *few, state_changed("planning", 3), *steps(6, 5.0), rebalance_ended(), EngineClosed()
    )
    assert measurement.record.stall_seconds is None
