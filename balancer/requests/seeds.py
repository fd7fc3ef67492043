"""Seeds to generators of random numbers: one stream for each purpose."""

from enum import IntEnum, unique

import numpy as np

from equipoise.hal.errors import UsageError


@unique
class Purpose(IntEnum):
    """What is drawn. Sizes and times of one seed must not come of the same bits: they would be
    correlated."""

    SIZES = 0
    ORDER = 1
    SAMPLE = 2
    ARRIVALS = 3


def drawing(seed: int, purpose: Purpose) -> np.random.Generator:
    """PCG64 of the seed; for all but `SIZES`, of a child of the seed.

    Raises: UsageError for a seed that is negative or no integer.
    """
    if type(seed) is not int or seed < 0:
        raise UsageError(f"a seed is a whole number from 0 on, not {seed!r}")
    key = () if purpose is Purpose.SIZES else (int(purpose),)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
