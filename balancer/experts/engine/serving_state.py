"""What this rank has installed: slots, tables, and the layout they stand for."""

import threading

from equipoise.balancer.experts.placement import ExpertShape, Layout, check_placement
from equipoise.balancer.experts.routing.layer_update import LayerUpdate, layer_update
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.kernels import Tables
from equipoise.hal.slots import Reader, SlotStore
from equipoise.hal.stream import Event, Role, Stream
from equipoise.hal.support.slot_access import ReaderRegistry

SlotCopies = tuple[tuple[int, int], ...]
"""(staging, local slot) pairs."""


class ServingState:
    """Changes only at boundaries, and only by programs of the compute stream.

    The compute stream itself copies staging into slots and then advances the generation words, so
    the steps before read the old weights by the old tables, and those behind the new by the new:
    no lock, and no instant at which tables and weights disagree. Other streams that read slots or
    tables are attached; a change comes, whole, between what they launched before and after it.

    Args:
        accelerator: whose compute stream reads slots and tables.
        store: this rank's slots; they must already hold `layout`.
        shape: how many of everything.
        layout: what the slots hold.
    """

    def __init__(
        self, accelerator: Accelerator, store: SlotStore, shape: ExpertShape, layout: Layout
    ) -> None:
        check_placement(layout.placement, shape)
        self._accelerator = accelerator
        self._compute = accelerator.stream(Role.COMPUTE)
        self._last_change = accelerator.event()
        self._changing = threading.Lock()
        self.readers = ReaderRegistry(accelerator.event)
        self._layout = layout
        self.store = store
        self.tables = Tables.empty(
            shape.layers, shape.experts, shape.slots, shape.ranks, accelerator.device
        )
        accelerator.kernels.warm(self.tables, self._compute)
        self.commit(layer_update(layout, shape, range(shape.layers)), ())

    @property
    def layout(self) -> Layout:
        """The installed layout, as of the last program launched."""
        return self._layout

    @property
    def last_change(self) -> Event:
        """Recorded on the compute stream behind the last change of slots or tables."""
        return self._last_change

    def attach(self, stream: Stream) -> Reader:
        """A further stream that reads slots or tables: a micro-batch, a draft model, a graph.

        What it launches from now on comes after the last change, and every change after what it has
        launched, until it is detached. Any thread may call.
        """
        # A change that another thread issues in between would hold this stream not yet, and wait
        # for the event that it records not any more.
        with self._changing:
            reader = self.readers.attach(stream)
            stream.wait(self._last_change)
        return reader

    def generation(self, layer: int) -> int:
        """Generation of a layer's tables, for programs of the compute stream."""
        return int(self.tables.generation[layer])

    def commit(self, change: LayerUpdate, copies: SlotCopies) -> None:
        """Copy staging into slots and install `change`, in this order on the compute stream.

        Weights and tables are one change to a reader on another stream: it is held from before
        the first copy until behind the last generation word.
        """
        with self._changing:
            held = self.readers.wait_for_readers(self._compute)
            if copies:
                self.store.commit(copies, self._compute)
            self._accelerator.kernels.commit_tables(change.tables, self.tables, self._compute)
            self._compute.record(self._last_change)
            self.readers.resume_readers(held, self._last_change)
            self._layout = change.applied_to(self._layout)
