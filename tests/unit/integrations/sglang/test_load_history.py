"""`LoadHistory`: what it keeps while traffic is the same, and what it forgets when it changes."""

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from equipoise.integrations.sglang.load_history import LoadHistory

LAYERS, EXPERTS, STEPS = 4, 32, 4
Loads = npt.NDArray[np.int64]


def traffic(seed: int) -> npt.NDArray[np.float64]:
    """(layers, experts), mean tokens of a step."""
    return 100 * np.random.default_rng(seed).pareto(1.5, (LAYERS, EXPERTS)) + 20


def window(rng: np.random.Generator, mean: npt.NDArray[np.float64]) -> Loads:
    """(steps, layers, experts), parts of the load vary from step to step around one mean."""
    jitter = np.exp(0.3 * rng.standard_normal((STEPS, *mean.shape)))
    return rng.poisson(mean * jitter).astype(np.int64)


def error(load: Loads, mean: npt.NDArray[np.float64]) -> float:
    """Squared distance of the parts of a load from those of what it was drawn from."""
    parts = [each / each.sum(axis=1, keepdims=True) for each in (load, mean)]
    return float(((parts[0] - parts[1]) ** 2).sum())


def test_load_history_predicts_steady_traffic_better_than_one_window() -> None:
    rng, mean, history = np.random.default_rng(3), traffic(1), LoadHistory()
    for _ in range(8):
        history.add(window(rng, mean))
    latest = window(rng, mean)
    earlier = history.predictive(latest)
    assert (earlier.sum(axis=1) > 0).any()
    assert error(latest.sum(axis=0) + earlier, mean) < error(latest.sum(axis=0), mean) / 2


def test_load_history_is_forgotten_by_layers_whose_traffic_changes() -> None:
    rng, before, history = np.random.default_rng(5), traffic(1), LoadHistory()
    for _ in range(4):
        history.add(window(rng, before))
    mean = before.copy()
    mean[1] = traffic(2)[1]
    changed = window(rng, mean)
    earlier = history.predictive(changed)
    assert earlier[1].sum() == 0
    assert (earlier[[0, 2, 3]].sum(axis=1) > 0).sum() >= 2
    history.add(changed)
    later = history.predictive(window(rng, mean))
    assert later[1].sum() <= changed[:, 1].sum(), "the new traffic only"


@given(st.integers(0, 2**31), st.integers(2, 6))
def test_load_history_is_worth_eight_windows_at_most(seed: int, count: int) -> None:
    rng, mean, history = np.random.default_rng(seed), traffic(seed), LoadHistory()
    totals = []
    for _ in range(10 * count):
        loads = window(rng, mean)
        history.add(loads)
        totals.append(loads.sum(axis=(0, 2)))
    kept = history.predictive(window(rng, mean)).sum(axis=1)
    assert (kept <= 7 * np.max(totals, axis=0)).all()


def test_load_history_needs_two_steps_and_the_same_shape() -> None:
    rng, mean, history = np.random.default_rng(1), traffic(1), LoadHistory()
    history.add(window(rng, mean))
    latest = window(rng, mean)
    assert history.predictive(latest.sum(axis=0)[None]).sum() == 0
    assert history.predictive(latest[:, :2]).tolist() == np.zeros((2, EXPERTS), int).tolist()
    history.clear()
    assert history.predictive(latest).sum() == 0


def test_load_history_does_not_overflow_with_largest_loads() -> None:
    history = LoadHistory()
    largest = np.full((2, 1, 4), 2**38, dtype=np.int64)
    for _ in range(20):
        history.add(largest)
    assert (history.predictive(largest) > 0).all()
