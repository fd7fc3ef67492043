"""What the tests of the host pool store, and what they look for afterwards."""

import gc
from collections.abc import Callable
from pathlib import Path

import torch
from helpers.processes.thread_control_plane import ThreadControl, meet
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.balancer.experts.host_pool.layout import PoolLayout
from equipoise.balancer.experts.host_pool.pool import HostExpertPool
from equipoise.balancer.experts.host_pool.shared_memory import MEMORY_NAME
from equipoise.hal.checksum import checksum
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import EquipoiseError
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


def same(actual: tuple[Tensor, ...], expected: list[Tensor]) -> bool:
    """Equal in shape, dtype and every element."""
    pairs = zip(actual, expected, strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def holdings(process: int | str = "self") -> tuple[int, int]:
    """How many descriptors and mappings of pools a process has."""
    descriptors = 0
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            descriptors += MEMORY_NAME in str(link.readlink())
        except FileNotFoundError:
            continue
    maps = Path(f"/proc/{process}/maps").read_text()
    return descriptors, sum(MEMORY_NAME in line for line in maps.splitlines())


def opened(
    control: ControlPlane, layout: PoolLayout = LAYOUT, name: str = "model"
) -> HostExpertPool:
    """A pool among all ranks of the control plane."""
    return HostExpertPool.open(control, range(control.size), layout, name=name, timeout=WATCHDOG)


def fill(pool: HostExpertPool, seed: int = 0) -> None:
    """This rank's part."""
    for which in pool.owned_experts():
        pool.write(*which, weights(pool.layout, *which, seed))


def sealed(control: ControlPlane, layout: PoolLayout = LAYOUT, seed: int = 0) -> HostExpertPool:
    """A pool that can be read."""
    pool = opened(control, layout)
    fill(pool, seed)
    pool.seal(WATCHDOG)
    return pool


def holds(pool: HostExpertPool, seed: int = 0) -> bool:
    """Whether every expert is what was filled, in place and by checksum."""
    layout = pool.layout
    for layer in range(layout.layers):
        for expert in range(layout.experts):
            expected = weights(layout, layer, expert, seed)
            expected_bytes = torch.cat([part.reshape(-1).view(torch.uint8) for part in expected])
            if not same(pool.view(layer, expert), expected):
                return False
            if pool.checksum(layer, expert) != checksum(expected_bytes):
                return False
    return True


def alone(program: Callable[[ThreadControl], object]) -> None:
    """As the only rank; raises what it raises."""
    (answer,) = meet(1, program)
    if isinstance(answer, BaseException):
        raise answer


def refused(
    program: Callable[[ThreadControl], object], ranks: int, kind: type[EquipoiseError]
) -> list[str]:
    """What every rank raised, all of them `kind`; nothing of a pool is left."""
    before = holdings()
    answers = meet(ranks, program)
    texts = [str(answer) for answer in answers]
    assert [type(answer) for answer in answers] == [kind] * ranks, texts
    del answers
    gc.collect()
    assert holdings() == before
    return texts
