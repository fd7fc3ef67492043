"""Worlds that are closed at the end of a test."""

from collections.abc import Iterator

import pytest
from helpers.strategies.virtual_worlds import Worlds

from equipoise.backends.virtual import BACKEND
from equipoise.backends.virtual.backend import VirtualBackend
from equipoise.backends.virtual.world import VirtualWorld


@pytest.fixture
def make_world() -> Iterator[Worlds]:
    worlds: list[VirtualWorld] = []

    def make(
        size: int = 1, schedule: bytes = b"", backend: VirtualBackend = BACKEND
    ) -> VirtualWorld:
        worlds.append(backend.world(size, schedule))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
