"""What the tests of copy threads copy, and how gently."""

import os
import time

import torch
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.balancer.experts.transfer.copy_threads import UNLIMITED_RATE, CopyLimits

GUARD = 251
"""What stands where nothing is copied to."""
SMALL = CopyLimits("small", 64, UNLIMITED_RATE)
STILL = CopyLimits("still", 64, 1e-3)
"""Begins one chunk, and the next a day later."""


def noise(nbytes: int, seed: int = 0) -> Tensor:
    """Bytes below the guard."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (nbytes,), dtype=torch.uint8, generator=random)


def guarded(nbytes: int) -> Tensor:
    """Where something is to arrive."""
    return torch.full((nbytes,), GUARD, dtype=torch.uint8)


def threads() -> set[int]:
    """Those of this process."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def ended(numbers: set[int]) -> bool:
    """Whether none of these threads is left, soon: the system lists one a little after its end."""
    expiry = time.monotonic() + WATCHDOG
    while threads() & numbers and time.monotonic() < expiry:
        time.sleep(0.001)
    return not threads() & numbers
