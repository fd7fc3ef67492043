"""Statistics and arrangements that hypothesis draws, small ones, and files of every format."""

from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest

from equipoise.balancer import formats
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.registry import PLACEMENT_FORMATS, STATISTICS_FORMATS
from equipoise.balancer.formats.statistics import ExpertStatistics
from equipoise.hal.errors import FormatError

LARGEST = 2**46 - 1
STATISTICS_FILES = [
    (form.name, suffix) for form in STATISTICS_FORMATS for suffix in form.write_suffixes
]
PLACEMENT_FILES = [
    (form.name, suffix) for form in PLACEMENT_FORMATS for suffix in form.write_suffixes
]
SHARES_ONE = 1 << 16


@st.composite
def numbers_of_layers(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """Ascending, none twice."""
    steps = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    return tuple(int(layer) - 1 for layer in np.cumsum(steps))


@st.composite
def statistics(draw: st.DrawFn) -> ExpertStatistics:
    """With and without counts by rank, numbers of iterations, experts per token."""
    ranks, windows, layers, experts = (draw(st.integers(1, most)) for most in (3, 3, 3, 4))
    size = ranks * windows * layers * experts
    flat = draw(st.lists(st.integers(0, LARGEST // 3), min_size=size, max_size=size))
    by_rank = np.array(flat, dtype=np.int64).reshape(ranks, windows, layers, experts)
    return ExpertStatistics(
        by_rank.sum(axis=0),
        draw(numbers_of_layers(layers)),
        draw(st.sampled_from([by_rank, None])),
        draw(st.none() | st.integers(0, 1000)),
        draw(st.none() | st.integers(1, experts)),
    )


@st.composite
def arrangements(draw: st.DrawFn) -> ExpertPlacement:
    """Any placement in which every expert has a slot, and any shares that sum to a whole."""
    layers, ranks, per_rank = (draw(st.integers(1, most)) for most in (3, 3, 3))
    slots = ranks * per_rank
    experts = draw(st.integers(1, slots))
    rows = []
    for _ in range(layers):
        more = draw(
            st.lists(
                st.integers(0, experts - 1), min_size=slots - experts, max_size=slots - experts
            )
        )
        rows.append(draw(st.permutations([*range(experts), *more])))
    placement = np.array(rows, dtype=np.int32)
    shares = np.zeros_like(placement)
    for layer, row in enumerate(placement):
        for expert in range(experts):
            slots_of_expert = np.flatnonzero(row == expert)
            cuts = draw(
                st.lists(st.integers(0, SHARES_ONE), min_size=slots_of_expert.size - 1, max_size=9)
            )
            ends = [0, *sorted(cuts[: slots_of_expert.size - 1]), SHARES_ONE]
            shares[layer, slots_of_expert] = np.diff(ends)
    return ExpertPlacement(placement, shares, ranks, draw(numbers_of_layers(layers)))


def small_statistics() -> ExpertStatistics:
    """Two ranks, two windows, layers 1 and 3, three experts."""
    by_rank = np.arange(24, dtype=np.int64).reshape(2, 2, 2, 3)
    return ExpertStatistics(by_rank.sum(axis=0), (1, 3), by_rank, 100, 2)


def small_arrangement() -> ExpertPlacement:
    """Three ranks of two slots, layers 1 and 3, four experts, uneven shares."""
    placement = np.array([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 3]], dtype=np.int32)
    shares = np.array(
        [[40000, 65536, 65536, 65536, 25536, 0], [20000, 65536, 65536, 65536, 30000, 15536]],
        dtype=np.int32,
    )
    return ExpertPlacement(placement, shares, 3, (1, 3))


def file_of_statistics(folder: Path, name: str, suffix: str) -> Path:
    """The small ones in a format."""
    path = folder / f"statistics{suffix}"
    formats.write_statistics(path, small_statistics(), name)
    return path


def file_of_arrangement(folder: Path, name: str, suffix: str) -> Path:
    """The small one in a format."""
    path = folder / f"placement{suffix}"
    formats.write_placement(path, small_arrangement(), name)
    return path


def fails(path: Path, data: bytes | str, read: Callable[[Path], object]) -> str:
    """Write, read, and what the error says after the name of the file."""
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(FormatError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ")
    return error.value.what
