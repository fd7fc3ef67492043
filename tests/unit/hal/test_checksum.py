"""The reference checksum: equal to the native one, for every kind of tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise import _native
from equipoise.hal import checksum as module
from equipoise.hal.checksum import checksum


@given(st.binary(max_size=300), st.integers(0, 3))
def test_checksum_equals_native_at_any_offset(data: bytes, offset: int) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)[offset:]
    assert checksum(tensor) == _native.checksum(data[offset:])


@given(data=st.binary(min_size=20, max_size=100), chunk=st.integers(1, 5))
def test_checksum_is_independent_of_chunk_size(data: bytes, chunk: int) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    whole = checksum(tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        assert checksum(tensor) == whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5)])
def test_checksum_accepts_any_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(30)[: torch.Size(shape).numel()].to(dtype).reshape(shape)
    as_bytes = tensor.reshape(-1).view(torch.uint8)
    assert checksum(tensor) == _native.checksum(as_bytes)


def test_checksum_accepts_parameter() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    assert checksum(parameter) == checksum(torch.ones(5))


def test_checksum_refuses_strided_tensor() -> None:
    with pytest.raises(ValueError, match="expected C-contiguous"):
        checksum(torch.zeros(4, 4).t())
