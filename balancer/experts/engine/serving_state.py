"""The installed state of a rank: slots, routing tables and the layout they implement."""

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
    """Slots, tables and layout; changed only at boundaries, by programs of the compute stream.

    The compute stream itself copies staging into slots and then advances the generation words. So
    earlier steps read old weights with old tables and later steps new weights with new tables,
    without a lock. Other streams that read slots or tables have to be attached; a change takes
    effect as a whole between what they launched before and after it.

    Args:
        accelerator: its compute stream reads slots and tables.
        store: this rank's slots, which must already hold `layout`.
        shape: numbers of layers, experts, slots and ranks.
        layout: the layout that the slots hold.
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
        """An event recorded on the compute stream after the last change of slots or tables."""
        return self._last_change

    def attach(self, stream: Stream) -> Reader:
        """Attaches another stream that reads slots or tables: of a micro-batch, draft or graph.

        What it launches from now on runs after the last change, and later changes run after what it
        has launched, until it is detached. Any thread may call.
        """
        # Without the lock, a change by another thread between the two lines would neither wait for
        # this stream, which it does not know yet, nor be waited for: the stream would wait for the
        # event of the change before.
        with self._changing:
            reader = self.readers.attach(stream)
            stream.wait(self._last_change)
        return reader

    def generation(self, layer: int) -> int:
        """Returns the generation of a layer's tables, as of the programs launched so far."""
        return int(self.tables.generation[layer])

    def commit(self, update: LayerUpdate, copies: SlotCopies) -> None:
        """Copies staging into slots, then installs the tables of `update`, on the compute stream.

        A reader on another stream sees weights and tables change at once: it is blocked from before
        the first copy until after the last generation word.
        """
        with self._changing:
            held_readers = self.readers.wait_for_readers(self._compute)
            if copies:
                self.store.commit(copies, self._compute)
            self._accelerator.kernels.commit_tables(update.tables, self.tables, self._compute)
            self._compute.record(self._last_change)
            self.readers.resume_readers(held_readers, self._last_change)
            self._layout = update.applied_to(self._layout)
