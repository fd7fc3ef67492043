"""What the tests of the host copier copy, and how gently."""

from pathlib import Path

import torch
from torch import Tensor

from equipoise.balancer.experts.copy_profile import UNLIMITED, Profile

SOON = 20.0
GUARD = 251
"""What stands where nothing is copied to."""
SMALL = Profile("small", 64, UNLIMITED)
STILL = Profile("still", 64, 1e-3)
"""Begins one chunk, and the next a day later."""


def noise(nbytes: int, seed: int = 0) -> Tensor:
    """Bytes below the guard."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (nbytes,), dtype=torch.uint8, generator=random)


def guarded(nbytes: int) -> Tensor:
    """Where something is to arrive."""
    return torch.full((nbytes,), GUARD, dtype=torch.uint8)


def threads_of_this_process() -> int:
    """How many run."""
    return len(list(Path("/proc/self/task").iterdir()))
