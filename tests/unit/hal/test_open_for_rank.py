"""Ranks of one machine take its devices in turn."""

import pytest
from helpers.fakes.two_device_backend import LINKS

from equipoise.backends.cpu import BACKEND, GLOO
from equipoise.backends.cpu.accelerator import CpuAccelerator, CpuBackend
from equipoise.hal.accelerator import check_device_count, open_for_rank
from equipoise.hal.errors import BackendUnavailable, UsageError


class CountedBackend(CpuBackend):
    """A backend of `count` devices that records the indices it opens."""

    name = "counted"

    def __init__(self, count: int) -> None:
        self._count = count
        self.opened_indices: list[int] = []

    def devices(self) -> int:
        return self._count

    def open(self, index: int) -> CpuAccelerator:
        self.opened_indices.append(index)
        return CpuAccelerator()


def test_open_for_assigns_devices_round_robin() -> None:
    backend = CountedBackend(3)
    for rank in range(5):
        open_for_rank(backend, rank).close()
    assert backend.opened_indices == [0, 1, 2, 0, 1]


def test_open_for_fails_without_devices() -> None:
    with pytest.raises(BackendUnavailable, match="'counted' has no device for rank 1"):
        open_for_rank(CountedBackend(0), 1)


def test_check_room_refuses_more_ranks_than_unshared_devices() -> None:
    """Clause B9."""
    check_device_count(CountedBackend(2), LINKS, 2)
    with pytest.raises(UsageError, match="3 ranks need 3 devices, and counted has 2 here"):
        check_device_count(CountedBackend(2), LINKS, 3)
    check_device_count(CountedBackend(2), GLOO, 3)


def test_open_for_gives_every_rank_the_cpu() -> None:
    for rank in (0, 7):
        accelerator = open_for_rank(BACKEND, rank)
        assert accelerator.name == "cpu:0"
        accelerator.close()
