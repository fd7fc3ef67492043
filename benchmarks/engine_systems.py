"""Ways to serve: without balancing, and with systems that bring new weights in different ways.

All are given the same plans, by the same schedule of blobs (`ship`), over the same link. What
differs is who waits for what. None of the others plans, builds a shipment, or looks at what it has
copied, while it is timed; ours does the latter two.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from emulated_device import EmulatedStore, Library, Unchecked
from emulation import INTERVAL, PARCEL, UPDATES, WINDOW
from engine_place import PER_RANK, Place, slots_of
from engine_traffic import SHAPE, Given, start
from straightforward import InUse, install

from equipoise.balancer.experts.balancer import AtBoundary, CommitPath, UnderLock, open_balancer
from equipoise.balancer.experts.change import Change, change_of
from equipoise.balancer.experts.config import EngineConfig, ShareMode
from equipoise.balancer.experts.drafting import Draft
from equipoise.balancer.experts.installed import Installed
from equipoise.balancer.experts.jobs import Job, Task, ThreadWorker, finish
from equipoise.balancer.experts.layout import Layout
from equipoise.balancer.experts.mover import Mover, Staged
from equipoise.balancer.experts.placement import Load
from equipoise.balancer.experts.planner import Freight, Proposal, by_groups, by_ship
from equipoise.balancer.experts.router import Router, TableRouter
from equipoise.balancer.experts.shipment import Shipment, ship
from equipoise.balancer.experts.writers import StreamWriter, Supply
from equipoise.hal import registry
from equipoise.hal.stream import Role

DEADLINE = 30.0
NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Ended:
    """A rebalance: the boundaries at which it was due and ended, and copies between ranks."""

    due: int
    step: int
    copies: int


class System(Protocol):
    """What the step loop asks of a way to serve."""

    router: Router
    installed: Installed
    held: torch.Tensor
    """int64 [layers, slots of a rank, 2]: what the slots hold."""
    ended: list[Ended]

    def free(self, step: int) -> bool:
        """What nobody has to wait for, before the clock starts; whether there was anything."""
        ...

    def boundary(self, step: int) -> None:
        """Between two steps."""
        ...

    def launched(self) -> None:
        """The step's forward is on its way."""
        ...

    def reading(self, layer: int, step: int) -> AbstractContextManager[None]:
        """Around what reads the slots of a layer."""
        ...

    def close(self) -> None:
        """End what runs beside."""
        ...


class Base:
    """Slots, tables and a router; nothing ever changes.

    Args:
        place: where.
        kind: of slot store.
        staging: buffers.
    """

    def __init__(
        self, place: Place, kind: type[EmulatedStore] = Unchecked, staging: int = 0
    ) -> None:
        self._place = place
        self._mine = slice(place.rank * PER_RANK, (place.rank + 1) * PER_RANK)
        self.held, self._store = slots_of(place, kind, staging)
        self.ended: list[Ended] = []
        self._prepare()

    def _prepare(self) -> None:
        self.installed = Installed(self._place.device, self._store, SHAPE, start())
        counters = torch.zeros((SHAPE.layers, SHAPE.experts), dtype=torch.int32)
        device, tables = self._place.device, self.installed.tables
        self.router: Router = TableRouter(device, tables, self._place.rank, counters)

    def free(self, step: int) -> bool:
        """Nothing."""
        return False

    def boundary(self, step: int) -> None:
        """Nothing."""

    def launched(self) -> None:
        """Nothing."""

    def reading(self, layer: int, step: int) -> AbstractContextManager[None]:
        """No lock."""
        return NOTHING

    def close(self) -> None:
        """Nothing."""


class Perfect(Base):
    """The last placement of each stage, there from its first step on, at no cost."""

    def __init__(self, place: Place, switches: Sequence[int]) -> None:
        last = {plan.stage: plan for plan in place.plans}
        self._by_step = {step: last[stage] for stage, step in enumerate(switches)}
        super().__init__(place)

    def free(self, step: int) -> bool:
        """Install a stage's placement."""
        found = self._by_step.get(step)
        if found is None:
            return False
        mine = torch.from_numpy(found.layout.placement[:, self._mine].astype(np.int64))
        compute = self._place.device.stream(Role.COMPUTE)
        for layer, experts in enumerate(mine):
            self.held[layer].copy_(self._place.rows[layer, experts])
        self.installed.commit(change_of(found.layout, SHAPE, range(SHAPE.layers)), ())
        compute.synchronize(DEADLINE)
        self.ended.append(Ended(step, step, found.moves))
        return True


@dataclass(frozen=True)
class Prepared:
    """What is known of a transfer before: how weights travel, and what is installed with them."""

    shipment: Shipment
    change: Change


def prepared(
    plans: Sequence[Given], groups: Sequence[Sequence[int]]
) -> Mapping[int, Sequence[Prepared]]:
    """By due step, a transfer for each group of layers."""
    found, before = {}, start()
    for plan in plans:
        steps = []
        for layers in groups:
            travel = ship(
                before.placement,
                _mixed(before, plan.layout, layers).placement,
                layers,
                SHAPE,
                staging=2 * SHAPE.layers * PER_RANK,
                parcel=PARCEL,
            )
            steps.append(Prepared(travel, change_of(plan.layout, SHAPE, layers)))
        found[plan.due] = steps
        before = plan.layout
    return found


def _mixed(before: Layout, after: Layout, layers: Sequence[int]) -> Layout:
    placement, shares = before.placement.copy(), before.shares.copy()
    placement[list(layers)] = after.placement[list(layers)]
    shares[list(layers)] = after.shares[list(layers)]
    return Layout(placement, shares)


class Travelling(Base):
    """A system that lets weights travel by itself.

    Args:
        place: where.
        staging: buffers.
        groups: layers that travel together.
    """

    def __init__(self, place: Place, staging: int, groups: Sequence[Sequence[int]]) -> None:
        super().__init__(place, staging=staging)
        moves = place.fabric.open(f"{place.label}.moves")
        self._mover = Mover(place.device, moves, self._store, range(SHAPE.ranks), DEADLINE)
        self._votes = place.fabric.open(f"{place.label}.votes")
        self._ready = prepared(place.plans, groups)

    def _travel(self, work: Prepared) -> Job[Staged]:
        """Stage what is on its way; where nothing moves, nothing."""
        if not work.shipment.lots:
            yield from ()
            return Staged(0, 0, (), 0)
        leg = work.shipment.leg(self._place.rank, 0)
        return (yield from self._mover.begin(leg, self.installed.settled))


class StopTheWorld(Travelling):
    """At the step of a rebalance everybody waits until all weights of all layers have moved."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, 2 * SHAPE.layers * PER_RANK, [range(SHAPE.layers)])

    def boundary(self, step: int) -> None:
        """Move, meet, install, meet."""
        for work in self._ready.get(step, ()):
            staged = finish(self._travel(work), DEADLINE)
            self._votes.barrier().result(DEADLINE)
            self.installed.commit(work.change, staged.copies)
            self._place.device.stream(Role.COMPUTE).synchronize(DEADLINE)
            self._votes.barrier().result(DEADLINE)
            self.ended.append(Ended(step, step, work.shipment.travelling))


class OneLayer(Travelling):
    """One layer in flight; every step of a cycle all ranks vote on it, and wait for the vote.

    A layer that does not change goes the same way. Maps are built one slot at a time, on the thread
    that steps. The next layer leaves when this one is installed; a plan that falls due in a cycle
    waits for its end.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place, PER_RANK, [[layer] for layer in range(SHAPE.layers)])
        self._worker = ThreadWorker(f"{place.label}.mover", DEADLINE)
        self._maps = InUse.empty(SHAPE.experts)
        self._due: deque[int] = deque()
        self._left: deque[Prepared] = deque()
        self._flying: Task[Staged] | None = None
        self._moved = 0

    def boundary(self, step: int) -> None:
        """Vote, install what has come everywhere, and let the next leave."""
        if step in self._ready:
            self._due.append(step)
        if self._flying is not None:
            self._vote(self._flying, step)
        if self._flying is None and self._due:
            self._left.extend(self._ready[self._due[0]])
            self._moved = 0
            self._leave()

    def close(self) -> None:
        """End the thread."""
        self._worker.close()

    def _vote(self, flying: Task[Staged], step: int) -> None:
        votes = torch.tensor([int(flying.done())], dtype=torch.int32)
        self._votes.all_reduce(votes).result(DEADLINE)
        if int(votes[0]) < SHAPE.ranks:
            return
        work, staged = self._left.popleft(), flying.result(DEADLINE)
        self.installed.commit(work.change, staged.copies)
        install(torch.from_numpy(work.change.placement[0].astype(np.int64)), self._maps)
        self._moved += work.shipment.travelling
        self._flying = None
        if self._left:
            self._leave()
        else:
            self.ended.append(Ended(self._due.popleft(), step, self._moved))

    def _leave(self) -> None:
        self._flying = self._worker.start(self._travel(self._left[0]))


class Ours(Base):
    """The engine, whose planner says what it is given.

    Args:
        place: where.
        way: how weights come into slots.
        shares: the share mode.
        own: whether the engine plans by itself instead.
    """

    def __init__(
        self,
        place: Place,
        way: Callable[[Place, EmulatedStore], CommitPath],
        shares: ShareMode = ShareMode.STATIC,
        own: bool = False,
    ) -> None:
        self._way, self._shares, self._own = way, shares, own
        super().__init__(place, EmulatedStore, staging=2 * PER_RANK)

    def _prepare(self) -> None:
        place = self._place
        config = EngineConfig(
            label=place.label,
            shares=self._shares,
            window_size=WINDOW,
            step_interval=INTERVAL,
            sub_window=WINDOW,
            parcel=PARCEL,
            layer_updates_per_iter=UPDATES,
            deadline=DEADLINE,
        )
        path = self._way(place, self._store)
        self._balancer = open_balancer(
            place.device, place.fabric, self._store, SHAPE, start(), config, path
        )
        self.installed, self.router = self._balancer.installed, self._balancer.router
        if not self._own:
            engine = self._balancer.engine
            # The engine, its protocol and its path run as they are; only what is planned is given.
            engine._path = Told(engine._path, place, isinstance(path, UnderLock))

    def boundary(self, step: int) -> None:
        """The engine's."""
        self._balancer.engine.boundary(step)
        reports = self._balancer.engine.reports
        for report in list(reports)[len(self.ended) :]:
            if report.outcome != "committed":
                raise RuntimeError(f"epoch {report.number} ended with: {report.outcome}")
            self.ended.append(Ended(report.opened, report.step, report.slots))

    def launched(self) -> None:
        """The engine's."""
        self._balancer.engine.launched()

    def reading(self, layer: int, step: int) -> AbstractContextManager[None]:
        """The engine's."""
        return self._balancer.reading(layer, step)

    def close(self) -> None:
        """The engine's."""
        self._balancer.close()


class Told:
    """A path that proposes what it is given, one after the other; all else is the path's own."""

    def __init__(self, inner: Any, place: Place, locked: bool) -> None:
        self._inner = inner
        self._plans = iter(place.plans)
        self._freight = Freight(PARCEL, 1, 2 * PER_RANK, place.rank)
        self._locked = locked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, load: Load, layout: Layout) -> Proposal:
        """The next plan, with its tables and its shipment."""
        after = next(self._plans).layout
        changed = np.flatnonzero((after.placement != layout.placement).any(axis=1))
        nothing = np.zeros(SHAPE.layers, dtype=np.int64)
        drafted = Draft(after, tuple(changed.tolist()), nothing, nothing)
        if self._locked:
            return by_groups(drafted, SHAPE, UPDATES)
        return by_ship(drafted, layout, SHAPE, self._freight)


def by_boundary(place: Place, store: EmulatedStore) -> CommitPath:
    """Weights come from peers."""
    return AtBoundary()


def by_lock(place: Place, store: EmulatedStore) -> CommitPath:
    """Weights come from the host's memory."""
    supply = Supply(Library(place.rows), StreamWriter(place.device, store))
    return UnderLock(supply, registry.accelerator("cpu").capabilities)
