"""A recorded load: rows that the shipped model routed over three texts, one after the other.

`equipoise record --steps 1200 --ranks 4 --out FOLDER`, summed over ranks and over ten steps at a
time: 400 steps each of Python, Chinese and tables, 4,576 rows per layer and step. Routing does not
depend on the batch that a row is in, so recording it again gives the same.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

FILE = Path(__file__).with_suffix(".npz")
STEPS, TEXTS = 1200, 3


def recorded_windows(steps: int, parts: int = 2) -> list[npt.NDArray[np.int64]]:
    """The load in windows of so many steps, each (parts, layers, experts).

    Args:
        steps: of a window; with it a text ends at the end of a window.
        parts: of a window, each of a multiple of ten steps.
    """
    with np.load(FILE) as file:
        tens = file["counts"].astype(np.int64)
    assert STEPS // TEXTS % steps == 0, steps
    windows = tens.reshape(STEPS // steps, parts, -1, *tens.shape[1:])
    return list(windows.sum(axis=2))
