"""The formulas of `docs/metrics.md`, each once.

Throughout, `rank_rows` is (steps, layers, ranks) int64: rows, one per (token, k), that a rank's
experts computed. A (step, layer) without any row has no balance and is left out of every mean.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.runtime.events import COMMITTED
from equipoise.demo.record import Counts, VariantRecord
from equipoise.report.noise import noise_floor

Reals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """The steps `first` to `last` - 1 that figures are taken over."""

    first: int
    last: int

    @property
    def steps(self) -> slice:
        """The window as an index into arrays whose first axis is steps."""
        return slice(self.first, self.last)


def relative_load(rows: Counts | Reals) -> Reals:
    """Load / mean along the last axis, ranks say: float64 without unit; nan where no row."""
    mean = rows.mean(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(mean > 0, rows / mean, np.nan), dtype=np.float64)


def imbalance_by_step(rank_rows: Counts) -> Reals:
    """max / mean - 1 over ranks, mean over layers: (steps,) float64; nan without rows."""
    return _mean_over_layers(relative_load(rank_rows).max(axis=-1) - 1.0)


def imbalance(rank_rows: Counts, window: Window) -> float:
    """max / mean - 1 over ranks, mean over layers and the window's steps; nan without rows."""
    return _mean(relative_load(rank_rows[window.steps]).max(axis=-1) - 1.0)


def balancedness(rank_rows: Counts, window: Window) -> float:
    """mean / max over ranks (vLLM's word), mean over layers and steps; nan without rows."""
    return _mean(1.0 / relative_load(rank_rows[window.steps]).max(axis=-1))


def floor_by_step(rank_rows: Counts) -> Reals:
    """The noise floor of each step, mean over layers: (steps,) float64; nan without rows."""
    ranks = rank_rows.shape[-1]
    rows = rank_rows.sum(axis=-1)
    floors = {int(n): noise_floor(int(n), ranks) for n in np.unique(rows) if n > 0}
    return _mean_over_layers(np.vectorize(lambda n: floors.get(int(n), np.nan), [float])(rows))


def floor(rank_rows: Counts, window: Window) -> float:
    """The noise floor, mean over layers and the window's steps; nan without rows."""
    return _mean(floor_by_step(rank_rows[window.steps]))


def stall_seconds(step_seconds: Reals, unbalanced_seconds: Reals, window: Window) -> float:
    """Sum over the window of max(0, step - median of the unbalanced steps of the same window).

    Seconds; both arguments are (steps,) float64. With both the same it is the A/A stall: what
    the noise of the machine alone looks like.
    """
    if window.first >= window.last:
        return 0.0
    usual = np.median(unbalanced_seconds[window.steps])
    return float(np.maximum(0.0, step_seconds[window.steps] - usual).sum())


def after_first_commit(balanced: VariantRecord | None, steps: int) -> Window:
    """From the first committed epoch's step to the end; the whole run where none committed."""
    commits = [e.step for e in balanced.epochs if e.outcome == COMMITTED] if balanced else []
    return Window(min(commits, default=0), steps)


def after_first_epoch_began(balanced: VariantRecord | None, steps: int) -> Window:
    """From the step that closed the first epoch's load window to the end: where stalls count."""
    begun = [e.planned_at for e in balanced.epochs] if balanced else []
    return Window(min(begun, default=0), steps)


def _mean(values: Reals) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _mean_over_layers(values: Reals) -> Reals:
    return np.array([_mean(step) for step in values], dtype=np.float64)
