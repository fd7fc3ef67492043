"""What engines ask for, drawn."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray


@dataclass(frozen=True)
class Problem:
    load: NDArray[np.int64]
    slots: int
    ranks: int

    @property
    def experts(self) -> int:
        return int(self.load.shape[1])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to 3 layers and 6 ranks; ties, zeros, layers of nothing, slots equal to experts."""
    ranks, size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    slots = ranks * size
    experts = draw(st.integers(size, slots))
    counts = st.lists(st.integers(0, 3000), min_size=experts, max_size=experts)
    rows = draw(st.lists(st.one_of(counts, st.just([0] * experts)), min_size=1, max_size=3))
    return Problem(np.array(rows, dtype=np.int64), slots, ranks)
