"""What the tests of the host pool store, and what they look for afterwards."""

from pathlib import Path

import torch
from torch import Tensor

from equipoise.balancer.experts.host.layout import PoolLayout
from equipoise.balancer.experts.host.memory import LABEL
from equipoise.hal.slots import SegmentType

DESCRIPTOR = (
    SegmentType("w13", (6, 5), torch.bfloat16),
    SegmentType("w2", (5, 3), torch.uint8),
    SegmentType("scale", (), torch.float32),
)
LAYOUT = PoolLayout(DESCRIPTOR, layers=3, experts=5)


def weights(layout: PoolLayout, layer: int, expert: int, seed: int = 0) -> list[Tensor]:
    """An expert's segments, which differ from expert to expert."""
    random = torch.Generator().manual_seed(seed * 10_000 + layer * 100 + expert)
    return [
        torch.randint(0, 120, segment.shape, generator=random).to(segment.dtype)
        for segment in layout.descriptor
    ]


def same(found: tuple[Tensor, ...], wanted: list[Tensor]) -> bool:
    """Equal in shape, dtype and every element."""
    pairs = zip(found, wanted, strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def holdings(process: int | str = "self") -> tuple[int, int]:
    """How many descriptors and mappings of pools a process has."""
    descriptors = 0
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            descriptors += LABEL in str(link.readlink())
        except FileNotFoundError:
            continue
    maps = Path(f"/proc/{process}/maps").read_text()
    return descriptors, sum(LABEL in line for line in maps.splitlines())
