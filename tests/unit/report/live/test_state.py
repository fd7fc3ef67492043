"""What messages make of the state of a live display."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from unit.report.live.conftest import EVEN, UNEVEN, ended, live_setup, load

from equipoise.report.live.state import LiveState, SampledLoad
from equipoise.report.run.metrics import StepRange, imbalance


@given(
    rows=arrays(
        np.int64,
        st.tuples(st.integers(1, 6), st.integers(1, 8)),
        elements=st.integers(0, 10_000),
    ).filter(lambda rows: bool((rows.sum(axis=1) > 0).all()))
)
def test_sampled_load_imbalance_is_that_of_the_table(
    rows: "np.ndarray[tuple[int, int], np.dtype[np.int64]]",
) -> None:
    sampled = SampledLoad(3, tuple(map(tuple, rows.tolist())))
    assert sampled.imbalance == pytest.approx(imbalance(rows[None], StepRange(0, 1)))
    layer, rank, ratio = sampled.fullest
    assert ratio == pytest.approx(rows[layer, rank] / rows[layer].mean())
    assert ratio == pytest.approx((rows / rows.mean(axis=1, keepdims=True)).max())
    assert max(sampled.computed) <= sampled.length + 1e-9
    assert sum(sampled.computed) == pytest.approx(rows.shape[1])


def test_live_state_measures_imbalance_before_and_after_commit(moved: LiveState) -> None:
    assert moved.commit is not None
    assert moved.commit.before == pytest.approx(0.9)
    assert moved.commit.after == 0.0
    assert moved.current.commits == [6]
    moved.update(load(8, *UNEVEN))
    assert moved.commit.after == 0.0


def test_live_state_ignores_samples_of_steps_before_commit() -> None:
    state = LiveState(live_setup())
    state.begin_pass("local")
    state.update(load(4, *UNEVEN))
    state.update(ended(1, 6))
    # The counts of a step are gathered while the next ones are served.
    state.update(load(5, *UNEVEN))
    assert state.commit is not None
    assert state.commit.after is None
    state.update(load(6, *EVEN))
    assert state.commit.after == 0.0


def test_live_state_counts_tokens_over_seconds_by_pass(moved: LiveState) -> None:
    assert moved.current.tokens_per_second == pytest.approx(400)
    assert moved.baseline is not None
    assert moved.baseline.tokens_per_second == pytest.approx(200)


def test_live_state_without_balancing_has_no_baseline() -> None:
    state = LiveState(live_setup())
    state.begin_pass("unbalanced")
    assert state.baseline is None


@pytest.mark.parametrize(
    ("outcome", "phase"), [("unchanged", "unchanged"), ("stalled", "aborted: stalled")]
)
def test_live_state_commits_nothing_where_rebalance_moves_nothing(outcome: str, phase: str) -> None:
    state = LiveState(live_setup())
    state.begin_pass("local")
    state.update(ended(2, 9, outcome=outcome, copies=0))
    assert state.commit is None
    assert state.current.commits == []
    assert state.rebalance is not None
    assert state.rebalance.phase == phase


def test_live_state_skips_step_that_routed_nothing() -> None:
    state = LiveState(live_setup())
    state.begin_pass("local")
    state.update(load(4, [0, 0, 0, 0], [0, 0, 0, 0]))
    assert state.load is None
    assert state.current.imbalance == {}
