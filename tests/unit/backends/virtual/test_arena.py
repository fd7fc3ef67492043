"""The arena: what is dropped is scribbled and comes back at once."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.backends.virtual.arena import ALIGNMENT, Arena, PaddedArena, bytes_of


def test_arena_reuses_dropped_memory_next() -> None:
    arena = Arena()
    first = arena.empty(64)
    place = first.data_ptr()
    del first
    assert arena.empty(48).data_ptr() == place


def test_arena_overwrites_memory_after_last_view() -> None:
    arena = Arena()
    block = arena.empty(32).fill_(7)
    view = block[4:12].view(torch.int32)
    del block
    assert arena.block_count == 1
    assert view.view(torch.uint8).tolist() == [7] * 8
    del view
    assert arena.block_count == 0
    assert 7 not in arena.empty(32).tolist()


def test_arena_block_is_kept_by_numpy_array() -> None:
    arena = Arena()
    array = bytes_of(arena.empty(8).fill_(3))
    assert arena.block_count == 1
    assert array.tolist() == [3] * 8
    del array
    assert arena.block_count == 0


def test_arena_fill_pattern_differs_between_blocks() -> None:
    arena = Arena()
    first = arena.empty(16).clone()
    assert first.tolist() != arena.empty(16).tolist()


def test_arena_makes_new_block_when_none_fits() -> None:
    arena = Arena()
    small = arena.empty(16).data_ptr()
    assert arena.empty(1 << 20).data_ptr() != small


def test_arena_does_not_fragment_over_many_cycles() -> None:
    arena = Arena()
    places: set[int] = set()
    for _ in range(50):
        pair = [arena.empty(100), arena.empty(300)]
        places.update(block.data_ptr() for block in pair)
        del pair
    assert len(places) <= 3


def test_padded_arena_storage_exceeds_tensor() -> None:
    block = PaddedArena().empty(24)
    assert block.storage_offset() == 0
    assert block.untyped_storage().nbytes() > 24
    assert block.is_contiguous()


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=30))
def test_arena_blocks_are_aligned_and_disjoint(requests: list[tuple[int, bool]]) -> None:
    arena = Arena()
    blocks: list[Tensor] = []
    for number, (nbytes, keep) in enumerate(requests):
        block = arena.empty(nbytes)
        assert block.data_ptr() % ALIGNMENT == 0 or nbytes == 0
        if keep:
            blocks.append(block.fill_(number))
        del block
    for block in blocks:
        assert len(set(block.tolist())) <= 1
    assert arena.block_count == len(blocks)


def test_arena_blocks_outlive_arena() -> None:
    arena = Arena()
    block = arena.empty(8).fill_(5)
    arena.close()
    del arena
    gc.collect()
    assert block.tolist() == [5] * 8


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.int64, torch.bfloat16])
def test_bytes_of_views_any_dtype_in_place(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    bytes_of(tensor)[:] = 1
    assert tensor.view(torch.uint8).tolist() == [1] * 3 * dtype.itemsize
    assert bytes_of(torch.zeros((), dtype=dtype)).tolist() == [0] * dtype.itemsize
