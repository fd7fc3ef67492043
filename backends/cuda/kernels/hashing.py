"""The hashes of the contract as device functions, bit for bit, and their part that the host does.

Unsigned arithmetic of the right width wraps by itself, so nothing here is masked.
"""

import triton
import triton.language as tl

from equipoise.hal.checksum import STEP64
from equipoise.hal.kernels import Salt
from equipoise.hal.routing import MASK32, STEP32

STEP_32 = tl.constexpr(STEP32)
STEP_64 = tl.constexpr(STEP64)


def salted_state(salt: Salt) -> int:
    """The state of mix32 before the index is absorbed, as int32.

    Signed, so that the launcher passes one type of number whatever the salt.
    """
    state = 0
    for word in (salt.step, salt.layer, salt.rank):
        state = _finalise(((state ^ (word & MASK32)) + STEP32) & MASK32)
    return state - (1 << 32) if state >> 31 else state


def _finalise(x: int) -> int:
    x ^= x >> 16
    x = x * 0x99F0736B & MASK32
    x ^= x >> 15
    x = x * 0xCEDA5629 & MASK32
    return x ^ x >> 16


@triton.jit
def finalise(x: tl.tensor) -> tl.tensor:
    """The finaliser of mix32, of uint32."""
    x = x ^ (x >> 16)
    x = x * 0x99F0736B
    x = x ^ (x >> 15)
    x = x * 0xCEDA5629
    return x ^ (x >> 16)


@triton.jit
def mix32(index: tl.tensor, state: tl.tensor) -> tl.tensor:
    """Hash int32 indices, after a `salted` int32, to uint32."""
    absorbed = index.to(tl.uint32, bitcast=True) ^ state.to(tl.uint32, bitcast=True)
    return finalise(absorbed + STEP_32)


@triton.jit
def mix64(x: tl.tensor) -> tl.tensor:
    """The mixer of the checksum, of uint64."""
    x = x ^ (x >> 32)
    x = x * 0xC92A4895548C7445
    x = x ^ (x >> 29)
    x = x * 0xB33D02297CFAF58D
    return x ^ (x >> 32)
