"""Checks of operands, against the words of clause G11."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.errors import KernelError
from equipoise.hal.kernels import Tables, TableUpdate
from equipoise.hal.support.validation import check_count, check_routing, check_update, copy_update

LAYERS, EXPERTS, SLOTS, TOKENS = 3, 2, 4, 5
TABLES = Tables.empty(LAYERS, EXPERTS, SLOTS, 1, torch.device("cpu"))
DTYPES = st.sampled_from((torch.int32, torch.int64, torch.int16, torch.float32))


def update(layers: tuple[int, ...]) -> TableUpdate:
    rows = len(layers)
    return TableUpdate(
        layers,
        torch.zeros((rows, EXPERTS + 1), dtype=torch.int32),
        torch.zeros((rows, SLOTS), dtype=torch.int32),
        torch.zeros((rows, SLOTS), dtype=torch.int32),
    )


@given(DTYPES, st.integers(0, 7), st.integers(1, 2), st.integers(-1, LAYERS))
def test_routing_operands_fit_only_as_the_clause_says(
    dtype: torch.dtype, length: int, step: int, layer: int
) -> None:
    slots = torch.zeros(length * step, dtype=dtype)[::step]
    ids, counts = (torch.zeros(n, dtype=torch.int32) for n in (TOKENS, EXPERTS))
    fits = dtype == torch.int32 and length == TOKENS and step == 1 and 0 <= layer < LAYERS
    try:
        check_routing(ids, TABLES, layer, slots, counts)
    except KernelError:
        assert not fits
    else:
        assert fits


@given(st.lists(st.integers(-1, LAYERS), max_size=4).map(tuple))
def test_update_fits_when_its_layers_are_known_and_distinct(layers: tuple[int, ...]) -> None:
    fits = set(layers) <= set(range(LAYERS)) and len(set(layers)) == len(layers)
    try:
        check_update(update(layers), TABLES)
    except KernelError:
        assert not fits
    else:
        assert fits


def test_copied_update_shares_no_memory_with_the_original() -> None:
    original = update((2, 0))
    copy = copy_update(original, TABLES)
    original.start.fill_(7)
    assert copy.layers == (2, 0)
    assert not copy.start.any()


def test_refused_operand_is_named_with_what_was_given_and_due() -> None:
    with pytest.raises(KernelError, match=r"^ids: expected contiguous torch.int32 \[n\] on cpu"):
        check_count(torch.zeros(3), torch.zeros(2, dtype=torch.int32))
