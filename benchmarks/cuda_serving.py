"""A serving loop of one rank that stands for one of many, with the shipped engine beside it.

Routing, counting, votes, jobs, copies, checksums, locks and tables are the engine's own, in a group
of one rank. What is planned is given: in every epoch and layer some of this rank's slots hand their
experts on, so that no weight comes from a peer. By the boundary path it is packed, staged, summed
and committed; under locks it comes from page-locked host memory.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import torch
from cuda_clock import DEADLINE, Mark
from cuda_library import Library
from cuda_model import Model
from cuda_place import Place
from cuda_plans import BOUNDARY, LOCKED, Told

from equipoise.balancer.experts.assembly import AtBoundary, CommitPath, Means, UnderLock, assemble
from equipoise.balancer.experts.balancer import ExpertBalancer
from equipoise.balancer.experts.config import EngineConfig, ShareMode
from equipoise.balancer.experts.gates import Gates
from equipoise.balancer.experts.journal import COMMITTED
from equipoise.balancer.experts.layout import Layout, even_shares
from equipoise.balancer.experts.members import Members
from equipoise.balancer.experts.placement import Shape, contiguous
from equipoise.balancer.experts.staff import threads
from equipoise.balancer.experts.states import Committing, Moving, Observing, Updating
from equipoise.balancer.experts.writers import StreamWriter, Supply
from equipoise.hal import registry
from equipoise.hal.checksum import MASK64
from equipoise.hal.communicator import Fabric, Rendezvous
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Role

ALONE = Members((0,), 0)
WINDOW = 4
"""Steps of a window of load; an epoch opens behind every one unless the one before goes on."""
NEVER = 1 << 20
"""Windows between epochs where there shall be none."""
WARM = 8
"""Steps at the beginning of a run that are not told."""
MOVING = Moving | Committing | Updating
numbers = count()


@contextmanager
def group(place: Place) -> Iterator[Fabric]:
    """A group of one rank, of the communicator that goes with the backend."""
    backend = registry.communicator(place.backend.communicator)
    host = backend.host()
    name, port = host.address
    fabric = backend.connect(Rendezvous(rank=0, size=1, host=name, port=port, deadline=DEADLINE))
    try:
        yield fabric
    finally:
        fabric.close()
        host.close()


@dataclass(frozen=True)
class Setting:
    """How a loop serves.

    Attributes:
        path: how weights come into slots.
        slots: of a layer that an epoch changes; 0 where no epoch opens.
    """

    path: str
    slots: int


@dataclass(frozen=True)
class Mode:
    """How steps come to the device.

    Attributes:
        name: in words.
        captured: whether each is a graph.
        ahead: steps that the host launches before it waits for one.
    """

    name: str
    captured: bool
    ahead: int


@dataclass(frozen=True)
class Run:
    """What some steps in a row were like.

    Attributes:
        seconds: of each step, from the end of the one before to its own.
        epochs: that ended meanwhile.
        inside: steps whose boundary was within an epoch.
    """

    seconds: list[float]
    epochs: int
    inside: int


class Serving:
    """A model, an engine, and the loop that runs both."""

    def __init__(self, model: Model, library: Library, fabric: Fabric, setting: Setting) -> None:
        self._model, self._setting = model, setting
        accelerator, sizes = model.place.accelerator, model.sizes
        self._shape = Shape(sizes.layers, sizes.experts, sizes.slots, sizes.ranks)
        staging = min(setting.slots + 1, sizes.here) if setting.path == BOUNDARY else 0
        self._store = accelerator.slot_store(SlotLayout(model.slots, staging))
        self._library = library
        self._balancer = self._opened(fabric)
        self._clock = model.place.clock(Role.COMPUTE)
        self._next, self._ended, self._looked = 0, 0, -1
        self._filled()
        self._graphs = dict(self._captured())
        model.place.settle()

    def _filled(self) -> None:
        """Slots hold what the start layout says, whatever was done with them before."""
        here, copy = self._shape.slots_per_rank, self._model.place.accelerator.stream(Role.COPY)
        slots = range(self._shape.layers * here)
        sources = [self._library.view(*divmod(slot, here)) for slot in slots]
        self._store.write(slots, sources, copy)
        self._model.place.settle()

    def _opened(self, fabric: Fabric) -> ExpertBalancer:
        setting, place = self._setting, self._model.place
        config = EngineConfig(
            label=f"cuda-{next(numbers)}",
            shares=ShareMode.STATIC,
            window_size=WINDOW,
            step_interval=WINDOW * (1 if setting.slots else NEVER),
            sub_window=WINDOW,
            layer_updates_per_iter=1,
            deadline=DEADLINE,
        )
        start = contiguous(self._shape)
        layout = Layout(start, even_shares(start, self._shape.experts))
        means = Means(
            place.accelerator, fabric, self._store, config, self._path(), threads(config), ALONE
        )
        balancer = ExpertBalancer(means, self._shape, assemble(means, self._shape, layout))
        if setting.slots:
            engine: Any = balancer.engine
            # The engine, its protocol and its path run as they are; only what is planned is given.
            engine._path = Told(engine._path, self._shape, setting.slots, setting.path)
        return balancer

    def _path(self) -> CommitPath:
        if self._setting.path == BOUNDARY:
            return AtBoundary()
        place = self._model.place
        supply = Supply(self._library, StreamWriter(place.accelerator, self._store))
        return UnderLock(supply, place.backend.capabilities)

    def _captured(self) -> Iterator[tuple[frozenset[int], Any]]:
        """A graph for every set of layers that a step may hold locks of, each run once before."""
        layers = range(self._shape.layers)
        kinds = {frozenset[int]()}
        if not self._model.place.backend.capabilities.graph_capture:
            return
        if self._setting.path == LOCKED:
            kinds |= {
                frozenset({layer - 1, layer} & set(layers)) for layer in range(len(layers) + 1)
            }
        self._launch(frozenset())
        self._clock.stream.synchronize(DEADLINE)
        for locked in sorted(kinds, key=sorted):
            graph = self._model.place.graph()
            graph.capture(self._clock.stream, lambda locked=locked: self._launch(locked))
            yield locked, graph

    def _launch(self, locked: frozenset[int]) -> None:
        """A step in which some layers are read under their locks, and everything is launched."""
        stream, guard = self._clock.stream, self._balancer.parts.guard
        stream.launch(self._model.begin)
        for layer in range(self._shape.layers):
            if layer in locked and isinstance(guard, Gates):
                guard.locks[layer].acquire(stream)
            self._layer(layer)
            if layer in locked and isinstance(guard, Gates):
                guard.locks[layer].release(stream)
        stream.launch(self._model.fill_up)

    def _layer(self, layer: int) -> None:
        slots = self._balancer.router.route(layer, 0, self._model.ids[layer])
        self._clock.stream.launch(lambda: self._model.layer(layer, slots))

    def _forward(self, step: int, mode: Mode) -> None:
        """One step, as the engine says which locks it carries."""
        guard = self._balancer.parts.guard
        if mode.captured:
            layers = range(self._shape.layers) if isinstance(guard, Gates) else ()
            locked = frozenset(layer for layer in layers if guard.locked(layer, step))
            self._graphs[locked].replay(self._clock.stream)
            return
        stream = self._clock.stream
        stream.launch(self._model.begin)
        for layer in range(self._shape.layers):
            with self._balancer.reading(layer, step):
                self._layer(layer)
        stream.launch(self._model.fill_up)

    def run(self, steps: int, mode: Mode) -> Run:
        """So many steps, behind a few that are not told of."""
        gc.collect()
        gc.disable()
        try:
            warm, _ = self._steps(WARM, mode, [])
            gone = self._epochs()
            marks, inside = self._steps(steps, mode, warm)
            marks[-1].wait()
        finally:
            gc.enable()
        seconds = [later.since(earlier) for earlier, later in pairwise(marks[-steps - 1 :])]
        return Run(seconds, self._epochs() - gone, inside)

    def _steps(self, count_: int, mode: Mode, marks: Sequence[Mark]) -> tuple[list[Mark], int]:
        """Marks behind those there are, one at the end of each step; how many were in an epoch."""
        found, inside = list(marks), 0
        for _ in range(count_):
            inside += self._step(mode)
            found.append(self._clock.point())
            if len(found) > mode.ahead:
                found[-1 - mode.ahead].wait()
        return found, inside

    def _step(self, mode: Mode) -> bool:
        """Launch the next one; whether its boundary was within an epoch."""
        engine: Any = self._balancer.engine
        with self._balancer.step(self._next):
            inside = not isinstance(engine.state, Observing)
            self._forward(self._next, mode)
        self._next += 1
        return inside

    def _epochs(self) -> int:
        """Epochs that have ended so far. Raises `RuntimeError` where one did not end well."""
        new = [report for report in self._balancer.engine.reports if report.step > self._looked]
        for report in new:
            if report.outcome != COMMITTED:
                raise RuntimeError(f"epoch {report.number} ended with: {report.outcome}")
            self._looked = report.step
        self._ended += len(new)
        return self._ended

    def rest(self, mode: Mode) -> None:
        """Go on until nothing is under way, and see that slots hold what the layout says.

        Raises:
            RuntimeError: they do not, or it does not come to an end.
        """
        engine: Any = self._balancer.engine
        for _ in range(64 * WINDOW):
            if not isinstance(engine.state, MOVING):
                break
            self._step(mode)
            self._clock.stream.synchronize(DEADLINE)
        else:
            raise RuntimeError(f"an epoch does not end: {engine.state}")
        self._model.place.settle()
        self._check()

    def _check(self) -> None:
        count_, here = len(self._store.layout.slots), self._shape.slots_per_rank
        device = self._model.place.accelerator.device
        sums = torch.empty(count_, dtype=torch.int64, device=device)
        self._store.checksum_slots(range(count_), sums, self._clock.stream)
        self._clock.stream.synchronize(DEADLINE)
        placement = self._balancer.installed.layout.placement
        for slot, found in enumerate(sums.tolist()):
            layer, place = divmod(slot, here)
            wanted = self._library.checksum(layer, int(placement[layer, place]))
            if found & MASK64 != wanted:
                raise RuntimeError(f"layer {layer}, slot {place}: holds what it should not")

    def close(self) -> None:
        """End the engine."""
        self._balancer.close()
