"""What this rank has installed: slots, tables, and the layout they stand for."""

from equipoise.balancer.experts.placement import Shape, Shares, check
from equipoise.balancer.experts.planner import Layout
from equipoise.balancer.experts.tables import table_update
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.kernels import Tables
from equipoise.hal.slots import SlotStore
from equipoise.hal.stream import Event, Role


class Installed:
    """Changes only at boundaries, and only by programs of the compute stream.

    The compute stream itself copies staging into slots and then advances the generation words, so
    the steps before read the old weights by the old tables, and those behind the new by the new:
    no lock, and no instant at which tables and weights disagree.

    Args:
        accelerator: whose compute stream reads slots and tables.
        store: this rank's slots; they must already hold `layout`.
        shape: how many of everything.
        layout: what the slots hold.
    """

    def __init__(
        self, accelerator: Accelerator, store: SlotStore, shape: Shape, layout: Layout
    ) -> None:
        check(layout.placement, shape)
        self._accelerator = accelerator
        self._compute = accelerator.stream(Role.COMPUTE)
        self._settled = accelerator.event()
        self._shape = shape
        self._layout = layout
        self.store = store
        self.tables = Tables.empty(
            shape.layers, shape.experts, shape.slots, shape.ranks, accelerator.device
        )
        self._write_tables(layout)

    @property
    def layout(self) -> Layout:
        """The installed layout, as of the last program launched."""
        return self._layout

    @property
    def settled(self) -> Event:
        """Recorded on the compute stream behind the last change of slots or tables."""
        return self._settled

    def generation(self, layer: int) -> int:
        """Generation of a layer's tables, for programs of the compute stream."""
        return int(self.tables.generation[layer])

    def commit(self, layout: Layout, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy staging into slots and install `layout`; ordered on the compute stream."""
        self.store.commit(copies, self._compute)
        self._write_tables(layout)

    def renew_shares(self, shares: Shares) -> None:
        """Install other shares for the same placement."""
        self._write_tables(Layout(self._layout.placement, shares))

    def _write_tables(self, layout: Layout) -> None:
        update = table_update(layout, self._shape, range(self._shape.layers))
        self._accelerator.kernels.commit_tables(update, self.tables, self._compute)
        self._compute.record(self._settled)
        self._layout = layout
