"""Start layouts and loads of the shape that vllm-ascend's policies are compared on.

58 layers, 256 experts, 32 ranks of 9 slots. An engine's first layout has the experts in order and
then the first 32 of them again, so that all the second copies are on the last ranks: with equal
loads 24 ranks take 9/8 of the mean. Loads are log-normal around 100,000 rows; with sigma 0.02 that
layout scores 1.14 max/mean. The mixed layout has every expert and 32 drawn ones in random places,
some of them twice on a rank; sigma 0.05 makes it score 1.14.
"""

import numpy as np
from numpy.typing import NDArray

LAYERS, RANKS, SIZE, EXPERTS = 58, 32, 9, 256
SLOTS = RANKS * SIZE
ROWS = 100_000
Ints = NDArray[np.int64]


def log_normal(rng: np.random.Generator, sigma: float) -> Ints:
    """(layers, experts)."""
    popularity = np.exp(sigma * rng.standard_normal((LAYERS, EXPERTS)))
    rows: Ints = np.rint(ROWS * popularity).astype(np.int64)
    return rows


def zipf(rng: np.random.Generator, exponent: float) -> Ints:
    """(layers, experts), ranks of popularity in an order of each layer's own."""
    sizes = 10 * ROWS / np.arange(1, EXPERTS + 1) ** exponent
    return np.stack([rng.permutation(sizes) for _ in range(LAYERS)]).astype(np.int64)


def first_layout() -> Ints:
    """(layers, ranks, slots of a rank)."""
    row = np.concatenate([np.arange(EXPERTS), np.arange(SLOTS - EXPERTS)])
    return np.tile(row.reshape(1, RANKS, SIZE), (LAYERS, 1, 1))


def mixed_layout(rng: np.random.Generator) -> Ints:
    """(layers, ranks, slots of a rank)."""
    rows = [
        rng.permutation([*range(EXPERTS), *rng.integers(0, EXPERTS, SLOTS - EXPERTS)])
        for _ in range(LAYERS)
    ]
    return np.stack(rows).reshape(LAYERS, RANKS, SIZE)


def copies(table: Ints) -> Ints:
    """(layers, experts)."""
    return np.stack([np.bincount(layer.ravel(), minlength=EXPERTS) for layer in table])


def workload(load: Ints, table: Ints) -> Ints:
    """What each slot takes under an even split, like `table`."""
    part = load // copies(table)
    rows = np.take_along_axis(part, table.reshape(LAYERS, -1), axis=1)
    rows_by_slot: Ints = rows.reshape(table.shape)
    return rows_by_slot


def score(load: Ints, table: Ints) -> NDArray[np.float64]:
    """max/mean of the ranks under an even split, by layer."""
    part = load / copies(table)
    ranks = np.take_along_axis(part, table.reshape(LAYERS, -1), axis=1)
    rank_loads = ranks.reshape(table.shape).sum(axis=2)
    ratios: NDArray[np.float64] = rank_loads.max(axis=1) / rank_loads.mean(axis=1)
    return ratios


def moves(before: Ints, after: Ints) -> int:
    """Slots whose expert was not on their rank."""
    present = (after[..., :, None] == before[..., None, :]).any(axis=-1)
    return int((~present).sum())
