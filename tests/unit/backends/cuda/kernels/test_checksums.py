"""Checksums on the device against the one function of the bytes: clause D4."""

import pytest
import torch
from helpers.harnesses.kernel_checks import (
    check_checksum,
    check_checksum_parts,
    check_checksum_rows,
)
from helpers.strategies.hypothesis_examples import few
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from helpers.harnesses.kernel_launchers import REAL, Launchers, guarded, on_device

from equipoise.hal.checksum import as_int64, checksum

pytestmark = pytest.mark.slow

KERNELS = Launchers(REAL)


def noise(*size: int) -> Tensor:
    """Bytes that are always the same."""
    source = torch.Generator().manual_seed(sum(size))
    return torch.randint(0, 256, size, generator=source).to(torch.uint8)


@few(12)
@given(st.binary(max_size=70), st.integers(0, 5))
def test_checksum_of_few_bytes_at_any_offset(data: bytes, offset: int) -> None:
    check_checksum(KERNELS, torch.tensor(list(data), dtype=torch.uint8), offset)


@few(15)
@given(st.integers(0, 40000), st.integers(0, 5), st.integers(1, 3))
def test_checksum_covers_all_blocks_with_few_programs(size: int, offset: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Here the device has one processor, which makes it the number of programs.
        patch.setattr(KERNELS.module("checksums"), "PROGRAMS", most)
        check_checksum(KERNELS, noise(size), offset)


@few(12)
@given(st.integers(0, 5), st.integers(0, 9000))
def test_checksum_rows_equal_the_reference(number: int, size: int) -> None:
    check_checksum_rows(KERNELS, noise(number, size))


@pytest.mark.parametrize("gap", [1, 4, 16])
def test_checksum_rows_with_gaps_equal_the_reference(gap: int) -> None:
    check_checksum_rows(KERNELS, noise(3, 5000 + gap)[:, :5000])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_checksum_reads_bytes_of_any_dtype(dtype: torch.dtype) -> None:
    data = noise(3, 5, 16).view(dtype)
    _, out = guarded(1, 0, torch.int64)
    KERNELS.checksum(on_device(data), out, KERNELS.workspace())
    assert out.tolist() == [as_int64(checksum(data))]


def test_checksum_refuses_strided_data() -> None:
    with pytest.raises(ValueError, match="data: expected C-contiguous"):
        KERNELS.checksum(on_device(noise(8))[::2], torch.zeros(1), KERNELS.workspace())
    with pytest.raises(ValueError, match="data: expected contiguous rows"):
        KERNELS.checksum_rows(
            on_device(noise(2, 8))[:, ::2], torch.zeros(2), KERNELS.workspace(buffers=2)
        )


def test_checksum_rows_refuse_too_small_workspace() -> None:
    with pytest.raises(ValueError, match="data: expected at most 1 rows, got 2"):
        KERNELS.checksum_rows(on_device(noise(2, 8)), torch.zeros(2), KERNELS.workspace())


@few(12)
@given(st.lists(st.integers(0, 11) | st.sampled_from((4096, 5001)), min_size=1, max_size=6))
def test_checksum_parts_equal_the_reference_wherever_words_are_cut(sizes: list[int]) -> None:
    check_checksum_parts(KERNELS, [noise(size) for size in sizes])


def test_checksum_parts_read_whole_words_where_they_are() -> None:
    """Nothing as large as a slot is put together: only words that go over a cut are."""
    parts = [noise(n) for n in (4096, 4099, 2, 3, 8192)]
    pieces = KERNELS.module("checksums").cut_at_words(parts)
    assert torch.equal(torch.cat(pieces), torch.cat(parts))
    assert all(piece.numel() % 4 == 0 for piece in pieces[:-1])
    storages = {part.untyped_storage().data_ptr() for part in parts}
    copied_sizes = [p.numel() for p in pieces if p.untyped_storage().data_ptr() not in storages]
    assert copied_sizes == [4, 4]
