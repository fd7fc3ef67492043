"""Pages of host memory, waited for by advancing the world."""

from typing import TYPE_CHECKING

from equipoise.hal.errors import PoolExhausted
from equipoise.hal.page_pool import PagePool, PoolPage

if TYPE_CHECKING:
    from equipoise.backends.virtual.device import Device


class VirtualPool(PagePool):
    """The host pool (clause A13) in a world without a clock."""

    def __init__(self, device: "Device", page_bytes: int, pages: int) -> None:
        super().__init__(device.arena.empty, page_bytes, pages)
        self._device = device

    def take(self, timeout: float) -> PoolPage:
        """A page that no copy reads any more."""
        found: list[PoolPage] = []

        def look() -> bool:
            page = self._free()
            if page is not None:
                found.append(page)
            return page is not None

        if not self._device.world.until(look, timeout):
            raise PoolExhausted(f"no page became free within {timeout:g} s")
        return found[0]
