"""Hashes as device functions, and what the host does of them."""

import pytest
import torch
from helpers.strategies.hypothesis_examples import few
from helpers.strategies.routing_kernel_cases import WORD, int32
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl
from helpers.harnesses.kernel_launchers import on_device

from equipoise.backends.cuda.kernels import hashing
from equipoise.hal.kernels import Salt
from equipoise.hal.routing import mix32

ANY = st.integers(-(1 << 40), 1 << 40)


@triton.jit
def mix_kernel(index: tl.tensor, state: tl.int32, out: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    tl.store(out + at, hashing.mix32(tl.load(index + at), state).to(tl.int64))


@few(20)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=4), ANY, WORD, ANY)
def test_mix32_with_any_salt_equals_the_reference(
    index: list[int], rank: int, layer: int, step: int
) -> None:
    out = on_device(torch.zeros(4, dtype=torch.int64))
    state = hashing.salted_state(Salt(rank, layer, step))
    mix_kernel[(1,)](on_device(int32(index)), state, out, SIZE=4)
    assert out.tolist() == mix32(torch.tensor(index), rank, layer, step).tolist()
    assert -(1 << 31) <= state < 1 << 31
