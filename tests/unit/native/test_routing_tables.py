"""Tables of several layers, and their digests."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from equipoise import _native
from equipoise.hal.checksum import checksum

UNHURRIED = settings(deadline=None)
Array = NDArray[np.int32]
Tables = tuple[Array, Array, Array]
SHARE_ONE = 65536


@st.composite
def layers(draw: st.DrawFn) -> tuple[Array, Array, int]:
    """Placement and shares of one to three layers, and how many experts."""
    experts = draw(st.integers(1, 4))
    spare = draw(st.integers(0, 5))
    extra = st.lists(st.integers(0, experts - 1), min_size=spare, max_size=spare)
    rows = [
        draw(st.permutations([*range(experts), *draw(extra)]))
        for _ in range(draw(st.integers(1, 3)))
    ]
    placement = np.array(rows, dtype=np.int32)
    shares = np.zeros_like(placement)
    for row, experts_of_layer in zip(shares, placement, strict=True):
        for expert in range(experts):
            slots = np.flatnonzero(experts_of_layer == expert)
            cuts = st.lists(
                st.integers(0, SHARE_ONE), min_size=len(slots) - 1, max_size=len(slots) - 1
            )
            row[slots] = np.diff([0, *sorted(draw(cuts)), SHARE_ONE])
    return placement, shares, experts


def empty(placement: Array, experts: int) -> Tables:
    """Filled with rubbish, so that what is not written shows."""
    start = np.full((len(placement), experts + 1), -7, dtype=np.int32)
    return start, np.full_like(placement, -7), np.full_like(placement, -7)


@UNHURRIED
@given(layers())
def test_build_tables_equals_single_layer_tables(case: tuple[Array, Array, int]) -> None:
    placement, shares, experts = case
    together, apart = empty(placement, experts), empty(placement, experts)
    _native.build_tables(placement, shares, experts, *together)
    for layer in range(len(placement)):
        rows = [part[layer] for part in apart]
        _native.build_table(placement[layer], shares[layer], experts, *rows)
    assert [part.tolist() for part in together] == [part.tolist() for part in apart]


@given(layers())
def test_digest_tables_is_checksum_of_layer_table(
    case: tuple[Array, Array, int],
) -> None:
    placement, shares, experts = case
    tables = empty(placement, experts)
    _native.build_tables(placement, shares, experts, *tables)
    for layer, digest in enumerate(_native.digest_tables(*tables)):
        row = np.concatenate([part[layer] for part in tables])
        assert int(digest) == checksum(torch.from_numpy(row))


def i32(*rows: list[int]) -> Array:
    return np.array(rows, dtype=np.int32)


@pytest.mark.parametrize(
    ("placement", "shares", "message"),
    [
        ([0, 0, 0], [65536, 0, 0], "placement: .* none for expert 1 of row 1"),
        ([0, 1, 1], [65536, 1, 65534], "shares: .* another for expert 1 of row 1"),
    ],
)
def test_build_tables_names_row_that_would_misroute(
    placement: list[int], shares: list[int], message: str
) -> None:
    given_rows = i32([0, 1, 1], placement), i32([65536, 1, 65535], shares)
    with pytest.raises(ValueError, match=message):
        _native.build_tables(*given_rows, 2, *empty(given_rows[0], 2))


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (2, 3, "shares rows: expected 1 elements, got 2"),
        (1, 2, "shares columns: expected 3 elements, got 2"),
    ],
)
def test_build_tables_rejects_other_shapes(rows: int, columns: int, message: str) -> None:
    placement = i32([0, 1, 1])
    with pytest.raises(ValueError, match=message):
        _native.build_tables(
            placement, np.zeros((rows, columns), dtype=np.int32), 2, *empty(placement, 2)
        )


def test_digest_tables_rejects_unequal_row_counts() -> None:
    with pytest.raises(ValueError, match="cumulative rows: expected 2 elements, got 1"):
        _native.digest_tables(i32([0], [0]), i32([0], [0]), i32([0]))
