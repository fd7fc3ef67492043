"""Pages of host memory that copies read from."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from equipoise.hal.stream import Event


@runtime_checkable
class Page(Protocol):
    """One page, held by its taker until it is given back."""

    @property
    def data(self) -> Tensor:
        """uint8 [page_bytes], host memory."""
        ...

    def give_back(self, after: Event | None) -> None:
        """Return it to the pool, to be handed out again once `after` is reached (A13).

        `after` is recorded behind the last copy that reads the page; None when none does. Giving
        a page back twice raises `SlotError`.
        """
        ...


@runtime_checkable
class HostPool(Protocol):
    """A fixed number of pages, page-locked where that is declared."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        ...

    def take(self, timeout: float) -> Page:
        """A page that no copy reads any more.

        Raises:
            PoolExhausted: none became free within `timeout` seconds.
        """
        ...
