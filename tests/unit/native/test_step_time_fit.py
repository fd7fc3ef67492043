"""What a prompt token weighs, by the times of steps: of given steps, without a router."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from equipoise._native import StepTimeFit

PER_LOAD = 1e-7
FIRST = 256
"""Steps before the first estimate."""
WINDOW = 8192
"""Steps that count."""


@dataclass(frozen=True)
class Steps:
    """Steps of two workers, of which one computes a prompt in one of five."""

    weight: float
    fixed: float = 0.01
    per_load: float = PER_LOAD
    noise: float = 0.05
    stall: float = 1.0
    """One step in a hundred takes so many times as long."""
    prompts: float = 0.2
    """The part of steps with one."""
    seed: int = 1

    def __iter__(self) -> Iterator[tuple[float, tuple[float, float], tuple[float, float]]]:
        dice = np.random.default_rng(self.seed)
        for number in range(1 << 20):
            loads = sorted(dice.uniform(1e5, 2e5, 2), reverse=True)
            tokens = float(dice.integers(100, 4000)) * (dice.random() < self.prompts)
            computing = int(dice.integers(2)) if tokens else 0
            work = max(loads[w] + self.weight * tokens * (w == computing) for w in range(2))
            seconds = (self.fixed + self.per_load * work) * np.exp(self.noise * dice.normal())
            seconds *= self.stall if number % 100 == 7 else 1.0
            yield seconds, (loads[0], tokens * (computing == 0)), (loads[computing], tokens)


def fit_of(*phases: tuple[Steps, int]) -> StepTimeFit:
    fit = StepTimeFit()
    for steps, count in phases:
        for step in islice(steps, count):
            fit.add(*step)
    return fit


@example(20.0, 0.1, 123)
@settings(max_examples=20)
@given(
    weight=st.sampled_from((20.0, 50.0, 200.0, 1000.0)),
    noise=st.sampled_from((0.0, 0.02, 0.1)),
    seed=st.integers(0, 2**32),
)
def test_fit_finds_weight_of_noisy_steps(weight: float, noise: float, seed: int) -> None:
    """Within five times the noise: the standard deviation is at most 0.9 of it (120 seeds each)."""
    steps = Steps(weight, noise=noise, seed=seed)
    bound = 5 * noise + 1e-3
    assert fit_of((steps, 4096)).prompt_weight() == pytest.approx(weight, rel=bound)


@settings(max_examples=20)
@given(noise=st.sampled_from((0.0, 0.02, 0.1, 0.5)), seed=st.integers(0, 2**32))
def test_fit_stays_0_where_prompts_are_free(noise: float, seed: int) -> None:
    fit = StepTimeFit()
    for step in islice(Steps(0.0, noise=noise, seed=seed), 4096):
        fit.add(*step)
        assert fit.prompt_weight() == 0


@pytest.mark.parametrize("weight", [20.0, 200.0])
def test_stalls_of_100_steps_change_weight_by_less_than_a_quarter(weight: float) -> None:
    fit = fit_of((Steps(weight, stall=100.0), 4096))
    assert fit.prompt_weight() == pytest.approx(
        fit_of((Steps(weight), 4096)).prompt_weight(), rel=0.25
    )


def test_fit_knows_no_weight_before_enough_steps() -> None:
    assert fit_of((Steps(200.0), FIRST - 1)).prompt_weight() == 0
    assert fit_of((Steps(200.0), FIRST)).prompt_weight() > 0


def test_fit_knows_no_weight_with_few_prompts() -> None:
    assert fit_of((Steps(200.0, prompts=0.01), FIRST)).prompt_weight() == 0


def test_fit_knows_no_weight_where_loads_cost_no_time() -> None:
    steps = Steps(0.0, per_load=0.0, noise=0.1)
    assert fit_of((steps, 4096)).prompt_weight() == 0


def test_weight_stays_while_no_prompts_come() -> None:
    busy = fit_of((Steps(200.0), 2048))
    quiet = fit_of((Steps(200.0), 2048), (Steps(200.0, prompts=0.0, seed=2), 2 * WINDOW))
    assert quiet.prompt_weight() == busy.prompt_weight() > 0


@pytest.mark.parametrize(("before", "after"), [(200.0, 20.0), (20.0, 200.0), (200.0, 0.0)])
def test_weight_follows_a_change_within_a_window(before: float, after: float) -> None:
    fit = fit_of((Steps(before), WINDOW), (Steps(after, seed=2), 2 * WINDOW))
    assert fit.prompt_weight() == pytest.approx(after, rel=0.25)


def test_weight_changes_seldom_while_steps_are_alike() -> None:
    fit, weights = StepTimeFit(), []
    for step in islice(Steps(200.0, noise=0.1), 4 * WINDOW):
        fit.add(*step)
        weights.append(fit.prompt_weight())
    assert len(set(weights)) <= 4


def test_cost_of_steps_that_follow_ends_is_not_that_of_prompts() -> None:
    """A prompt follows an end, after which steps are slower for a while than loads would say."""
    fit, dice = StepTimeFit(), np.random.default_rng(3)
    for _ in range(200):
        load = float(dice.uniform(1e5, 2e5))
        for age in range(20):
            slower = 1.3 if age < 10 else 1.0
            seconds = (0.01 + PER_LOAD * load) * slower * np.exp(0.02 * dice.normal())
            tokens = 1000.0 if age == 0 else 0.0
            fit.add(seconds, (load, tokens), (load, tokens))
    assert fit.prompt_weight() == 0
