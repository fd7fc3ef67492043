"""The oracle of collectives, and the data it is asked about."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.conformance.collectives import (
    MOVES,
    SUMS,
    Call,
    bits,
    due,
    shape_of,
    tame,
    text_of,
)
from equipoise.hal.conformance.collectives import (
    given as contributed,
)
from equipoise.hal.conformance.determinism import EXPONENT, brim, rough, wild
from equipoise.hal.conformance.rejections import EVERY

SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)
SIZES = st.integers(1, 8)
KEYS = st.integers(0, 50)
REAL = [
    dtype
    for dtype in EVERY
    if not dtype.is_complex and str(dtype) not in ("torch.uint16", "torch.uint32", "torch.uint64")
]
WHOLE = [d for d in REAL if not d.is_floating_point and d != torch.bool]


@given(SHAPES)
def test_shape_survives_text_round_trip(shape: tuple[int, ...]) -> None:
    assert shape_of(text_of(shape)) == shape


@given(st.sampled_from(SUMS), st.sampled_from(REAL), SIZES, KEYS)
def test_small_integers_sum_exactly_in_every_dtype(
    op: str, dtype: torch.dtype, size: int, key: int
) -> None:
    call = Call(op, dtype, (5,), key=key)
    exact = torch.stack([tame(call, giver, 0).double() for giver in range(size)]).sum(0)
    if dtype != torch.bool:
        assert torch.equal(due(call, 0, size, tame).double(), exact)


@given(st.sampled_from(WHOLE), SIZES, KEYS)
def test_largest_integers_sum_without_overflow(dtype: torch.dtype, size: int, key: int) -> None:
    call = Call("all_reduce", dtype, (5,), key=key)
    exact = [
        sum(column)
        for column in zip(*(brim(call, g, 0).tolist() for g in range(size)), strict=True)
    ]
    assert due(call, 0, size, brim).tolist() == exact
    assert all(abs(number) > torch.iinfo(dtype).max // 16 * size for number in exact)


@given(SHAPES, SIZES, KEYS)
def test_all_to_all_oracle_transposes_inputs(shape: tuple[int, ...], size: int, key: int) -> None:
    call = Call("all_to_all", torch.int32, shape, key=key)
    table = torch.stack([contributed(call, rank, size, tame) for rank in range(size)])
    for rank in range(size):
        assert torch.equal(due(call, rank, size, tame), table[:, rank])


@given(st.sampled_from(sorted(EXPONENT.keys() - {torch.float8_e4m3fn}, key=str)), KEYS)
def test_arbitrary_bits_alternate_with_non_finite_numbers(dtype: torch.dtype, key: int) -> None:
    unit = wild(Call("shift", dtype, (6,), key=key), 0, 0).float()
    assert not unit[::2].isfinite().any()


@given(st.sampled_from(MOVES), st.sampled_from(REAL), KEYS)
def test_oracle_inputs_differ_between_ranks(op: str, dtype: torch.dtype, key: int) -> None:
    call = Call(op, dtype, (32,), key=key)
    for values in (tame, wild):
        assert not torch.equal(bits(values(call, 0, 0)), bits(values(call, 1, 0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_sum_depends_on_order(dtype: torch.dtype) -> None:
    call = Call("all_reduce", dtype, (64,))
    parts = [rough(call, giver, 0) for giver in range(4)]
    forth, back = sum(parts[1:], parts[0]), sum(parts[-2::-1], parts[-1])
    assert not torch.equal(forth, back)
