"""Synthetic expert loads: popularity that is skewed, drifts from window to window, and switches.

The model is that of the project's placement study; its figures are fitted so that a layer of 256
experts, 8 a rank on 32 ranks, without balancing, looks like Table 1 of TensorRT-LLM's tech blog 4:
standard deviation of the ranks 491.6 at a mean of 1,024, max/mean - 1 of 1.564; of the slots 164.1
at a mean of 128, and 10.948. `python benchmarks/lib/loads.py` prints what this model gives.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Odds = npt.NDArray[np.float64]
TABLE_1 = {"rank std": 491.6, "rank imbalance": 1.564, "slot std": 164.1, "slot imbalance": 10.948}


@dataclass(frozen=True)
class Model:
    """What loads look like.

    Attributes:
        layers: how many.
        experts: of a layer.
        ranks: that a batch is divided among.
        sigma: of the logarithm of an expert's popularity, mean over layers.
        spread: of sigma from layer to layer.
        block: part of the log-variance that 8 neighbouring experts share.
        domain: part of it that a domain brings, and a switch takes away.
        domains: how many there are.
        dominant: weight of the domain of the moment; the others share the rest.
        period: windows until the domain switches.
        jitter: of an expert's popularity between sub-windows.
        batch_jitter: of an expert's popularity in a batch beside that of its window.
        sub_windows: of a window.
        rows: of a rank and sub-window, and of a rank and batch.
    """

    layers: int = 58
    experts: int = 256
    ranks: int = 32
    sigma: float = 1.12
    spread: float = 0.3
    block: float = 0.02
    domain: float = 0.55
    domains: int = 4
    dominant: float = 0.7
    period: int = 4
    jitter: float = 0.15
    batch_jitter: float = 0.085
    sub_windows: int = 16
    rows: int = 1024


@dataclass(frozen=True)
class Window:
    """What was routed within one window.

    Attributes:
        counts: (sub_windows, layers, experts).
        odds: (layers, experts), popularity behind it, sums to 1.
        switched: whether the domain is another than in the window before.
    """

    counts: Counts
    odds: Odds
    switched: bool

    @property
    def load(self) -> Counts:
        """(layers, experts)."""
        total: Counts = self.counts.sum(axis=0)
        return total


def windows(model: Model, seed: int, count: int) -> Iterator[Window]:
    """So many windows, one after the other."""
    rng = np.random.default_rng(seed)
    popularity = _popularity(model, rng)
    for number in range(count):
        odds = _mixture(popularity, model, number // model.period % model.domains)
        subs = [
            _draw(_jittered(odds, model.jitter, rng), model.ranks * model.rows, rng)
            for _ in range(model.sub_windows)
        ]
        yield Window(np.stack(subs), odds, number > 0 and number % model.period == 0)


def batches(model: Model, odds: Odds, seed: int, count: int) -> Iterator[Counts]:
    """(layers, experts) of so many batches in a window of that popularity."""
    rng = np.random.default_rng((seed, 1))
    for _ in range(count):
        yield _draw(_jittered(odds, model.batch_jitter, rng), model.ranks * model.rows, rng)


def _popularity(model: Model, rng: np.random.Generator) -> Odds:
    shape = model.layers, model.experts
    sigma = model.sigma + model.spread * rng.standard_normal((model.layers, 1))
    blocks = rng.standard_normal((model.layers, -(-model.experts // 8)))
    neighbours = np.repeat(blocks, 8, axis=1)[:, : model.experts]
    own = 1.0 - model.block - model.domain
    logarithm = np.maximum(sigma, 0.2) * (
        np.sqrt(own) * rng.standard_normal(shape)
        + np.sqrt(model.block) * neighbours
        + np.sqrt(model.domain) * rng.standard_normal((model.domains, *shape))
    )
    return _normal(np.exp(logarithm))


def _mixture(popularity: Odds, model: Model, domain: int) -> Odds:
    weights = np.full(model.domains, (1.0 - model.dominant) / max(model.domains - 1, 1))
    weights[domain] = model.dominant
    mixed: Odds = np.tensordot(weights, popularity, axes=1)
    return _normal(mixed)


def _jittered(odds: Odds, jitter: float, rng: np.random.Generator) -> Odds:
    return _normal(odds * np.exp(jitter * rng.standard_normal(odds.shape)))


def _normal(odds: Odds) -> Odds:
    scaled: Odds = odds / odds.sum(axis=-1, keepdims=True)
    return scaled


def _draw(odds: Odds, rows: int, rng: np.random.Generator) -> Counts:
    return rng.multinomial(rows, odds).astype(np.int64)


def looks(model: Model, seeds: int = 8) -> dict[str, float]:
    """The figures of Table 1, mean over seeds: batches without balancing, experts in order."""
    figures_by_seed = []
    for seed in range(seeds):
        (window,) = windows(model, seed, 1)
        (batch,) = batches(model, window.odds, seed, 1)
        ranks = batch.reshape(model.layers, model.ranks, -1).sum(axis=2)
        figures_by_seed.append([figure for rows in (ranks, batch) for figure in _unevenness(rows)])
    return dict(zip(TABLE_1, np.mean(figures_by_seed, axis=0).tolist(), strict=True))


def _unevenness(rows: Counts) -> tuple[float, float]:
    over = rows.max(axis=1) / rows.mean(axis=1) - 1.0
    return float(rows.std(axis=1).mean()), float(over.mean())


if __name__ == "__main__":
    for name, figure in looks(Model()).items():
        print(f"{name:16} {figure:9.3f}   Table 1 {TABLE_1[name]:9.3f}")
