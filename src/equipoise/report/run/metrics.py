"""The formulas of `docs/metrics.md`, each once, and the noise floor.

The noise floor is the imbalance that chance leaves with a perfect placement. Throughout,
`rank_rows` is (steps, layers, ranks) int64: rows, one per (token, k), that a rank's experts
computed. A (step, layer) without any row has no balance and is left out of every mean.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.runtime.events import COMMITTED
from equipoise.demo.run_record import Counts, VariantRecord

Reals = npt.NDArray[np.float64]

EXACT_UP_TO = 256
"""Mean rows per rank up to which the floor is summed exactly; beyond, the normal limit is within
1 % of it on up to 8 ranks (`docs/metrics.md`) and costs nothing."""

_NEGLIGIBLE = 1e-9
"""Of a probability: less than that the transform leaves of its own rounding."""


def noise_floor(rows: int, ranks: int) -> float:
    """Expected max / mean - 1 of `rows` rows thrown uniformly on `ranks` ranks, without unit.

    Exact for at most `EXACT_UP_TO` rows per rank, the normal limit above. Raises ValueError
    unless both are positive.
    """
    if rows < 1 or ranks < 1:
        raise ValueError(f"a noise floor needs rows and ranks, got {rows} rows on {ranks} ranks")
    if rows <= EXACT_UP_TO * ranks:
        return exact_noise_floor(rows, ranks)
    return normal_noise_floor(rows, ranks)


@lru_cache(maxsize=4096)
def exact_noise_floor(rows: int, ranks: int) -> float:
    """The floor as the sum of P(maximum > m), by the generating function of truncated Poissons.

    Given their sum, independent Poisson counts are multinomial; hence P(maximum <= m) is the
    weight of `rows` in the `ranks`-fold convolution of a Poisson cut off at m, divided by the
    same weight without the cut. Method: Levin, "A representation for multinomial cumulative
    distribution functions", Annals of Statistics 9(5), 1981.
    """
    least = -(-rows // ranks)
    log_poisson = _log_poisson(rows, rows / ranks)
    whole = float(_log_poisson(rows, float(rows))[-1])
    expected = float(least)
    for most in range(least, rows):
        within = _weight_of_sum(np.exp(log_poisson[: most + 1]), rows, ranks)
        tail = 1.0 - within / math.exp(whole)
        expected += max(0.0, tail)
        if tail < _NEGLIGIBLE:
            break
    return expected * ranks / rows - 1.0


def normal_noise_floor(rows: int, ranks: int) -> float:
    """The floor in the limit of many rows: sqrt(ranks / rows) times the expected maximum of
    `ranks` standard normal variables (the mean of the counts cancels their correlation)."""
    return math.sqrt(ranks / rows) * _expected_normal_maximum(ranks)


def _weight_of_sum(weights: Reals, total: int, terms: int) -> float:
    """Weight of `total` in the convolution of `weights` with itself, `terms` terms in all."""
    # Longer than the longest sum, so that the circular convolution does not wrap; a power of two
    # because transforms of prime lengths cost a hundred times as much.
    length = 1 << max(terms * (len(weights) - 1), total).bit_length()
    convolved = np.fft.irfft(np.fft.rfft(weights, length) ** terms, length)
    return float(convolved[total])


def _log_poisson(most: int, mean: float) -> Reals:
    """Logarithms of the Poisson probabilities of 0 .. most."""
    counts = np.arange(most + 1, dtype=np.float64)
    log_factorials = np.concatenate(([0.0], np.cumsum(np.log(counts[1:]))))
    return np.asarray(counts * math.log(mean) - mean - log_factorials, dtype=np.float64)


@lru_cache(maxsize=64)
def _expected_normal_maximum(ranks: int) -> float:
    """Mean of the largest of `ranks` standard normals, by the trapezoid rule on
    the integral of 1 - F(x)^n - F(-x)^n over positive x."""
    grid = np.linspace(0.0, 12.0, 12001)
    upper = np.array([0.5 * math.erfc(x / math.sqrt(2.0)) for x in grid])
    above = 1.0 - (1.0 - upper) ** ranks
    below = upper**ranks
    return max(0.0, float(np.trapezoid(above - below, grid)))


@dataclass(frozen=True)
class StepRange:
    """The steps `first` to `last` - 1 that figures are taken over."""

    first: int
    last: int

    @property
    def steps(self) -> slice:
        """The window as an index into the first axis, steps."""
        return slice(self.first, self.last)


def relative_load(rows: Counts | Reals) -> Reals:
    """Load / mean along the last axis, ranks say: float64 without unit; nan where no row."""
    mean = rows.mean(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(mean > 0, rows / mean, np.nan), dtype=np.float64)


def imbalance_by_step(rank_rows: Counts) -> Reals:
    """max / mean - 1 over ranks, mean over layers: (steps,) float64; nan without rows."""
    return _mean_over_layers(relative_load(rank_rows).max(axis=-1) - 1.0)


def imbalance(rank_rows: Counts, window: StepRange) -> float:
    """max / mean - 1 over ranks, mean over layers and the window's steps; nan without rows."""
    return _mean(relative_load(rank_rows[window.steps]).max(axis=-1) - 1.0)


def balancedness(rank_rows: Counts, window: StepRange) -> float:
    """mean / max over ranks (vLLM's word), mean over layers and steps; nan without rows."""
    return _mean(1.0 / relative_load(rank_rows[window.steps]).max(axis=-1))


def noise_floor_by_step(rank_rows: Counts) -> Reals:
    """The noise floor of each step, mean over layers: (steps,) float64; nan without rows."""
    ranks = rank_rows.shape[-1]
    rows = rank_rows.sum(axis=-1)
    floors = {int(n): noise_floor(int(n), ranks) for n in np.unique(rows) if n > 0}
    return _mean_over_layers(np.vectorize(lambda n: floors.get(int(n), np.nan), [float])(rows))


def mean_noise_floor(rank_rows: Counts, window: StepRange) -> float:
    """The noise floor, mean over layers and the window's steps; nan without rows."""
    return _mean(noise_floor_by_step(rank_rows[window.steps]))


def stall_seconds(step_seconds: Reals, unbalanced_seconds: Reals, window: StepRange) -> float:
    """Sum over the window of max(0, step - median of the unbalanced steps of the same window).

    Seconds; both arguments are (steps,) float64. With both the same it is the A/A stall: what
    the noise of the machine alone looks like.
    """
    if window.first >= window.last:
        return 0.0
    usual = np.median(unbalanced_seconds[window.steps])
    return float(np.maximum(0.0, step_seconds[window.steps] - usual).sum())


def after_first_commit(balanced: VariantRecord | None, steps: int) -> StepRange:
    """From the first committed rebalance's step to the end; the whole run where none committed."""
    commits = [e.step for e in balanced.rebalances if e.outcome == COMMITTED] if balanced else []
    return StepRange(min(commits, default=0), steps)


def after_first_rebalance_began(balanced: VariantRecord | None, steps: int) -> StepRange:
    """The steps in which stalls count: from the end of the first load window on."""
    planned_steps = [e.opened_at for e in balanced.rebalances] if balanced else []
    return StepRange(min(planned_steps, default=0), steps)


def _mean(values: Reals) -> float:
    numbers = values[~np.isnan(values)]
    return float(numbers.mean()) if numbers.size else float("nan")


def _mean_over_layers(values: Reals) -> Reals:
    return np.array([_mean(step) for step in values], dtype=np.float64)
