"""What the benchmarks judge by is right: the matching, the risk of ranks, and the recording."""

import sys
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def benchmark(name: str) -> Any:
    """A module of the folder, which is no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


matching, risk, recorded = benchmark("matching"), benchmark("risk"), benchmark("recorded")


@st.composite
def homes(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Up to 7 experts on up to 3 of up to 4 ranks."""
    ranks = draw(st.integers(1, 4))
    some = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=3, unique=True)
    return draw(st.lists(some, max_size=7)), ranks


@settings(deadline=None)
@given(homes())
def test_no_choice_of_ranks_runs_fewer_experts_than_the_matching(
    case: tuple[list[list[int]], int],
) -> None:
    held, ranks = case
    chosen = matching.matched(held, ranks)
    assert all(rank in places for rank, places in zip(chosen, held, strict=True))
    if held:
        most = max(np.bincount(chosen))
        assert most == min(max(np.bincount(told)) for told in product(*held))


def a_packing(seed: int) -> tuple[Any, NDArray[np.int64]]:
    """Four ranks of three slots, nine experts; loads of twelve sub-windows."""
    rng = np.random.default_rng(seed)
    expert = np.array([0, 1, 2, 0, 3, 4, 1, 5, 6, 2, 7, 8])
    share = np.where(expert < 3, 0.5, 1.0)
    return risk.Packing(expert, share, 4), rng.integers(0, 100, (12, 9))


@pytest.mark.parametrize("seed", range(10))
def test_trades_leave_what_each_expert_has_and_no_expert_twice_on_a_rank(seed: int) -> None:
    packing, windows = a_packing(seed)
    before = sorted(zip(packing.expert.tolist(), packing.share.tolist(), strict=True))
    packing.search(risk.moments(windows, 99), 1.0, np.ones(12, dtype=np.bool_))
    assert sorted(zip(packing.expert.tolist(), packing.share.tolist(), strict=True)) == before
    for rank in packing.expert.reshape(4, 3).tolist():
        assert len(set(rank)) == 3


def test_factors_and_rest_make_up_the_covariance() -> None:
    _, windows = a_packing(0)
    covariance = np.cov(windows.T)
    whole = risk.moments(windows, 99)
    assert np.allclose(whole.factors @ whole.factors.T, covariance)
    assert np.allclose(whole.rest, 0.0)
    few = risk.moments(windows, 2)
    assert few.factors.shape == (9, 2)
    assert np.allclose((few.factors**2).sum(axis=1) + few.rest, covariance.diagonal())


def test_experts_that_are_busy_together_are_parted() -> None:
    """0 and 1 in one half of the windows, 2 and 3 in the other: means alike."""
    windows = np.array([[100, 100, 0, 0], [0, 0, 100, 100]] * 4)
    packing = risk.Packing(np.arange(4), np.ones(4), 2)
    packing.search(risk.moments(windows, 99), 1.0, np.ones(4, dtype=np.bool_))
    assert {frozenset(rank) for rank in packing.expert.reshape(2, 2).tolist()} <= {
        frozenset(pair) for pair in ((0, 2), (0, 3), (1, 2), (1, 3))
    }


def test_a_recording_has_every_row_of_every_step() -> None:
    found = recorded.record(seed=0, steps=6)
    rows = found.rows()
    assert rows.shape == (6, 6, 32)
    assert found.switches == (2, 4)
    for number, step in enumerate(found.steps):
        tokens = step.prompt + step.decoding.shape[1]
        assert (rows[number].sum(axis=1) == tokens * 4).all()
        assert step.decoding.shape[1] == 8 * number
