"""`commit: in_place`: layers are rewritten from the host's memory, a few per step, under a lock.

Every expert is once in memory that the workers of the machine share. After loading, each worker
fills it with the experts that it has; a rebalance copies from there, so nothing goes from peer to
peer, and no device memory is taken for weights in transfer.

A layer is rewritten between two of its forward passes. In both the stream holds its lock while it
reads the slots: from the layer's router, which is called before its experts, to the router of the
next layer, or to the end of the step. What else runs in between delays the lock's release, and
nothing else. A captured forward pass would hold no lock, so it is refused (`config_check`).

The boundary before a step, which hands layers over, runs when the step's first layer asks for
slots, and not when the step before was launched: an engine may idle between the two for longer than
a lock may be waited for.
"""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from equipoise.balancer.experts.context import InPlaceFromHost
from equipoise.balancer.experts.host_pool.layout import PoolLayout
from equipoise.balancer.experts.host_pool.pool import HostExpertPool, ranks_on_node
from equipoise.balancer.experts.open import LayerGroupContext
from equipoise.balancer.experts.placement import Placement
from equipoise.balancer.experts.transfer.copy_threads import CopyThreadPool
from equipoise.balancer.experts.transfer.host_writes import (
    CpuWriter,
    HostWeights,
    SlotWriter,
    StreamWriter,
)
from equipoise.hal import registry
from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.streams import EngineStreams
from equipoise.integrations.vllm.worker_context import BACKEND_OF_DEVICE, WorkerContext

LOG = logging.getLogger("equipoise.memory")
SLOWEST_FILL = 100e6
"""Bytes per second at which a machine fills its pool and reads it back, at least: bounds waits."""


class HostPools:
    """Fills and holds the pools of a model's layer groups; an `UpdatePathFactory`.

    Args:
        context: of the worker.
        placement: int32 [layers, slots], what the slots hold; every layer alike.
        name: unique among the models of the engine.
    """

    def __init__(self, context: WorkerContext, placement: Placement, name: str) -> None:
        self._context = context
        self._placement = placement
        self._name = name
        self._resources = ExitStack()

    def __call__(self, group: LayerGroupContext) -> InPlaceFromHost:
        """Fill a pool with the experts of a group; collective.

        Raises:
            IntegrationError: the workers are on several machines.
            HostMemoryExhausted: this one has no memory for another copy of all experts.
            ExpertPoolError: its workers cannot share memory.
        """
        context, name = self._context, f"{self._name}.{group.group_number}"
        control, timeout = context.fabric.control, context.deadline
        topology = context.accelerator.topology()
        ranks = ranks_on_node(control, topology, name=name, timeout=timeout)
        if len(ranks) != control.size:
            raise IntegrationError(
                f"commit in_place: the experts of {control.size} ranks are on several machines, "
                f"and this one has {len(ranks)}: use commit staged"
            )
        layout = PoolLayout(group.group.descriptor, len(group.layers), group.model.experts)
        # Not the bound of a step's waits: the experts of a large model take minutes.
        fill_timeout = timeout + layout.nbytes / SLOWEST_FILL
        if control.rank == 0:
            LOG.info("filling the host's memory with all experts: %.1f GB", layout.nbytes / 1e9)
        pool = HostExpertPool.open(
            control,
            ranks,
            layout,
            name=name,
            timeout=fill_timeout,
            owner_ranks=self._owner_ranks(group.model.slots_per_rank),
        )
        self._resources.callback(pool.close)
        self._fill(pool, group)
        pool.seal(fill_timeout)
        # The ranks of a machine share its cores, and so do their copy threads.
        threads = CopyThreadPool.near_accelerator(topology, accelerators=len(ranks))
        copy_threads = self._resources.enter_context(threads)
        device = context.accelerator.device.type
        writer: SlotWriter = (
            CpuWriter(copy_threads, group.store, timeout)
            if device == "cpu"
            else StreamWriter(context.accelerator, group.store)
        )
        capabilities = registry.accelerator(BACKEND_OF_DEVICE[device]).capabilities
        return InPlaceFromHost(HostWeights(pool, writer), capabilities)

    def close(self) -> None:
        """Release the memory and end the threads; the balancer is closed."""
        self._resources.close()

    def _owner_ranks(self, slots_per_rank: int) -> list[int]:
        """Return the rank that fills each expert, in every layer: one that has it.

        Of several the one that has to fill the fewest; experts on one rank only come first.
        """
        holders: dict[int, list[int]] = {}
        for slot, expert in enumerate(self._placement[0].tolist()):
            ranks = holders.setdefault(expert, [])
            if slot // slots_per_rank not in ranks:
                ranks.append(slot // slots_per_rank)
        owners, owned = dict[int, int](), Counter[int]()
        for expert in sorted(holders, key=lambda each: (len(holders[each]), each)):
            owners[expert] = min(holders[expert], key=lambda rank: (owned[rank], rank))
            owned[owners[expert]] += 1
        return [owners[expert] for expert in range(len(owners))]

    def _fill(self, pool: HostExpertPool, group: LayerGroupContext) -> None:
        slots_per_rank = group.model.slots_per_rank
        first = self._context.fabric.control.rank * slots_per_rank
        local = self._placement[0, first : first + slots_per_rank].tolist()
        # What the engine has loaded is on its stream.
        self._context.streams.compute_stream.synchronize(self._context.deadline)
        for layer, expert in pool.owned_experts():
            slot = group.group.slots[layer * slots_per_rank + local.index(expert)]
            pool.write(layer, expert, [segment.data for segment in slot])


class SlotReads:
    """Holds the lock of the layer whose experts run, and runs the boundary before a step's first.

    Args:
        reading_slots: of the balancer; a context around what a step launches for a layer.
        streams: the engine's streams.
    """

    def __init__(
        self,
        reading_slots: Callable[[int, int], AbstractContextManager[None]],
        streams: EngineStreams,
    ) -> None:
        self._reading_slots = reading_slots
        self._streams = streams
        self._lock: AbstractContextManager[None] | None = None
        self._boundary: Callable[[], None] | None = None

    def end_step(self, next_boundary: Callable[[], None]) -> None:
        """Leave the last layer, within an ordered section; `next_boundary` runs when the next step
        enters its first."""
        self.leave()
        self._boundary = next_boundary

    def enter(self, layer: int, step: int) -> None:
        """Leave the layer before, and enter this one.

        Raises what `reading_slots` and the boundary raise.
        """
        with self._streams.ordered_section():
            self.leave()
            boundary, self._boundary = self._boundary, None
            if boundary is not None:
                boundary()
            lock = self._reading_slots(layer, step)
            lock.__enter__()
            self._lock = lock

    def leave_in_order(self) -> None:
        """The same as `leave`, in an ordered section of its own."""
        with self._streams.ordered_section():
            self.leave()

    def leave(self) -> None:
        """Leave the layer that is held, if one is; within an ordered section."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.__exit__(None, None, None)
