"""The verbs that every exchange of this package has, so that a step may run on any of them."""

from typing import Protocol

from torch import Tensor

from equipoise.hal.stream import Stream
from equipoise.pipeline.expert_exchange.arrivals import Arrivals
from equipoise.pipeline.expert_exchange.batch import Batch


class Combining(Protocol):
    """A batch whose results were sent."""

    def wait(self, stream: Stream) -> Tensor:
        """Order `stream` behind the results, [n, top_k, ...]."""
        ...

    def release(self, stream: Stream) -> None:
        """All that reads the results has been launched on `stream`, or before."""
        ...


class Dispatching(Protocol):
    """A batch whose rows were sent."""

    def wait(self, stream: Stream) -> Arrivals:
        """Order `stream` behind the rows."""
        ...

    def combine(self, rows: Tensor, stream: Stream) -> Combining:
        """Send results back, [entries, ...]."""
        ...


class TokenExchange(Protocol):
    """Rows to the ranks that hold their experts, and back."""

    def dispatch(self, batch: Batch, stream: Stream) -> Dispatching:
        """Send a batch."""
        ...
