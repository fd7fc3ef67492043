"""What entries come to."""

import math

import numpy as np
import pytest
from helpers.strategies.journal_entries import (
    SHAPE,
    SLOT_BYTES,
    SUB_WINDOW,
    ended,
    entered,
    moved,
    rows,
    steps,
    summed,
)
from hypothesis import given
from hypothesis import strategies as st

from equipoise import _native
from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, Layout, imbalance
from equipoise.balancer.experts.runtime.events import (
    BalanceMeasured,
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
    digest = EventAggregator()
    return [derived for entry in entries for derived in digest.process(entry)]


def settled(*entries: Event) -> list[RebalanceMeasured]:
    return [entry for entry in read(*entries) if isinstance(entry, RebalanceMeasured)]


def test_balancedness_sums_layers_and_imbalance_averages_them() -> None:
    # Slots hold 0 1 2 | 2 3 0, so experts 0 and 2 have a copy on each rank.
    load = np.array([[10, 20, 10, 40], [0, 100, 0, 100]], dtype=np.int64)
    found = measure_balance(summed(8, load))
    assert found.balancedness == pytest.approx((40 + 100) / (50 + 100))
    assert found.imbalance == pytest.approx((50 / 40 - 1 + 0.0) / 2)
    assert found.mean_rows == pytest.approx(140 / SUB_WINDOW)
    assert found.max_rows == pytest.approx(150 / SUB_WINDOW)


def test_balance_ignores_layers_without_rows() -> None:
    load = np.array([[10, 20, 10, 40], [0, 0, 0, 0]], dtype=np.int64)
    assert measure_balance(summed(8, load)).imbalance == pytest.approx(50 / 40 - 1)
    nothing = measure_balance(summed(8, rows(0, 0, 0, 0)))
    assert math.isnan(nothing.imbalance)
    assert math.isnan(nothing.balancedness)


@given(st.lists(st.integers(0, 10**6), min_size=4, max_size=4).filter(lambda load: sum(load) > 0))
def test_balance_imbalance_equals_planner_imbalance(load: list[int]) -> None:
    entry = summed(8, rows(*load))
    planned = imbalance(entry.load, entry.layout, SHAPE).mean() / SHARE_ONE
    assert measure_balance(entry).imbalance == pytest.approx(planned, abs=2e-4, rel=1e-2)


def test_balance_uses_shares_applied_by_router() -> None:
    entry = summed(8, rows(60, 0, 0, 20))
    wanted = np.array([[SHARE_ONE, SHARE_ONE, SHARE_ONE, 0, SHARE_ONE, 0]] * 2, dtype=np.int32)
    even = measure_balance(entry)
    solved = measure_balance(
        type(entry)(8, SUB_WINDOW, entry.load, entry.layout, SHAPE, lambda *_: wanted)
    )
    loads = rank_loads(entry.load, Layout(entry.layout.placement, wanted), SHAPE)
    assert loads.tolist() == [[60.0, 20.0]] * 2
    assert solved.imbalance == pytest.approx(0.5)
    assert even.imbalance == pytest.approx(0.25)


@given(st.data())
def test_arrivals_of_all_ranks_equal_native_move_count(data: st.DataObject) -> None:
    ranks, per, layers = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4), st.just(2)))
    slots = ranks * per
    shape = ExpertShape(layers, experts=1 if slots < 3 else 3, slots=slots, ranks=ranks)
    draw = st.lists(st.integers(0, shape.experts - 1), min_size=slots, max_size=slots)
    before, after = (
        np.array([data.draw(draw) for _ in range(layers)], dtype=np.int32) for _ in range(2)
    )
    assert sum(slots_received(before, before, place, shape) for place in range(ranks)) == 0
    here = [slots_received(before, after, place, shape) for place in range(ranks)]
    assert sum(here) == _native.count_moves(before, after, ranks)


def test_epoch_is_settled_by_first_sub_window_after_its_end() -> None:
    load, early, late = rows(10, 20, 10, 40), summed(10, rows(1, 1, 1, 1)), 11
    digest = EventAggregator()
    assert digest.process(ended(place=0, ended_at=9)) == ()
    assert [type(entry) for entry in digest.process(early)] == [BalanceMeasured]
    balance, told = digest.process(summed(late, load))
    assert isinstance(balance, BalanceMeasured)
    assert isinstance(told, RebalanceMeasured)
    assert told.record.imbalance_actual == balance.imbalance
    assert told.record.bytes_received == SLOT_BYTES
    assert [type(entry) for entry in digest.process(summed(13, load))] == [BalanceMeasured]


def test_epoch_without_copies_does_not_hide_outcome_of_earlier_one() -> None:
    told = settled(
        ended(ended_at=9), ended(number=4, ended_at=11, copies=0), summed(14, rows(1, 1, 1, 1))
    )
    assert [entry.record.number for entry in told] == [3, 4]
    assert [entry.record.imbalance_actual for entry in told] == pytest.approx([0.0, 0.0])


def test_epoch_outcome_is_unknown_when_next_epoch_moved_first() -> None:
    told = settled(ended(ended_at=9), ended(number=4, ended_at=11), summed(14, rows(1, 1, 1, 1)))
    assert [entry.record.number for entry in told] == [3, 4]
    assert told[0].record.imbalance_actual is None
    assert told[1].record.imbalance_actual == pytest.approx(0.0)


def test_rank_without_arrivals_copied_zero_bytes() -> None:
    (told,) = settled(ended(place=1), EngineClosed())
    assert told.record.bytes_received == 0
    assert slots_received(*moved(), 0, SHAPE) == 1


def test_aborted_epoch_is_settled_at_once() -> None:
    (told,) = settled(ended(outcome="plans differ"))
    assert told.record.outcome == "plans differ"
    assert told.record.imbalance_actual is None


@pytest.mark.parametrize("last", [EngineClosed(), ended(number=4, outcome="plans differ")])
def test_epoch_is_settled_without_later_sub_window(last: Event) -> None:
    told = settled(ended(), last)
    assert told[0].record.number == 3
    assert told[0].record.imbalance_actual is None


def test_stall_is_step_time_above_median_outside_epochs() -> None:
    outside = [entered("idle"), *steps(0, *[1.0] * MIN_BASELINE_STEPS, 9.0)]
    inside = [entered("planning", 3), *steps(6, 1.5, 0.5, 2.0)]
    found = read(*outside, *inside, ended(), EngineClosed())
    stalls = [entry.seconds for entry in found if isinstance(entry, StepStalled)]
    assert stalls == pytest.approx([0.5, 1.0])
    (told,) = [entry for entry in found if isinstance(entry, RebalanceMeasured)]
    assert told.record.stall_seconds == pytest.approx(1.5)


def test_epoch_without_stall_has_zero_stall() -> None:
    outside = [entered("idle"), *steps(0, *[1.0] * MIN_BASELINE_STEPS)]
    (told,) = settled(*outside, entered("planning", 3), *steps(6, 0.5), ended(), EngineClosed())
    assert told.record.stall_seconds == 0.0


def test_stall_median_excludes_draining_steps() -> None:
    outside = [entered("idle"), *steps(0, *[1.0] * MIN_BASELINE_STEPS)]
    drained = [entered("draining"), *steps(6, *[50.0] * 9), entered("idle")]
    found = read(*outside, *drained, entered("planning", 3), *steps(15, 3.0))
    assert [entry.seconds for entry in found if isinstance(entry, StepStalled)][-1] == 2.0


def test_stall_is_unknown_before_enough_usual_steps() -> None:
    few = [entered("idle"), *steps(0, *[1.0] * (MIN_BASELINE_STEPS - 1))]
    (told,) = settled(*few, entered("planning", 3), *steps(6, 5.0), ended(), EngineClosed())
    assert told.record.stall_seconds is None
