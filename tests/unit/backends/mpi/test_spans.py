"""Clause A3: what overlaps what is written is read first."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.backends.mpi.communicator import copy_if_overlapping

WINDOW = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted)


@given(WINDOW, st.lists(WINDOW, max_size=3))
def test_mpi_overlapping_source_is_copied(
    read_window: list[int], write_windows: list[list[int]]
) -> None:
    memory = torch.arange(9, dtype=torch.uint8)
    source = memory[slice(*read_window)]
    source_copy = copy_if_overlapping(source, *(memory[slice(*window)] for window in write_windows))
    assert torch.equal(source_copy, source)
    write_offsets = {place for window in write_windows for place in range(*window)}
    if write_offsets & set(range(*read_window)):
        assert source_copy.data_ptr() != source.data_ptr()


def test_mpi_source_without_overlap_is_not_copied() -> None:
    memory = torch.arange(9, dtype=torch.uint8)
    source = memory[3:6]
    assert copy_if_overlapping(source, memory[:3], memory[6:]) is source
