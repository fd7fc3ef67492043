"""The balancer of one model on one rank, and the set of all models of a rank.

One engine per layer group, one step counter per model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from equipoise.balancer.experts.balancer import ExpertBalancer
from equipoise.balancer.experts.closing import close_all, close_quietly
from equipoise.balancer.experts.placement import Layout
from equipoise.balancer.experts.transfer.layer_locks import UNLOCKED
from equipoise.balancer.experts.weights.expert_weights import ExpertModel, LayerGroup, format_ranges
from equipoise.balancer.experts.weights.memory_report import MemoryReport, RoundOrder, memory_report
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import EquipoiseError, ExpertsLost, UsageError
from equipoise.hal.slots import Reader, SlotStore
from equipoise.hal.stream import Stream


@dataclass(frozen=True, eq=False)
class LayerGroupContext:
    """What a commit path is made for.

    Attributes:
        accelerator: this rank's device.
        model: whose family it is.
        number: of the family, among those of the model.
        store: its slots. Their numbers are row * slots_per_rank + local slot, where *row* counts
            the layers of this family alone.
    """

    accelerator: Accelerator
    model: ExpertModel
    number: int
    store: SlotStore

    @property
    def family(self) -> LayerGroup:
        """Layers with slots of one descriptor."""
        return self.model.groups[self.number]

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's own number of the layer of each row."""
        return tuple(self.model.numbers[row] for row in self.family.layers)

    @property
    def entries(self) -> dict[int, int]:
        """By row: how often every step enters the layer."""
        return {row: self.model.entries[at] for row, at in enumerate(self.family.layers)}

    @property
    def name(self) -> str:
        """For errors: an engine counts the layers of its family from 0."""
        return name_of(self.model, self.number)

    @contextmanager
    def error_context(self) -> Iterator[None]:
        """Errors that are raised inside say whose they are."""
        try:
            yield
        except EquipoiseError as error:
            raise self.add_context(error)  # noqa: B904 - it is the same error

    def add_context(self, error: EquipoiseError) -> EquipoiseError:
        """The same error, which says whose it is, once."""
        if not str(error).startswith(self.name):
            error.args = (f"{self.name}: {error}", *error.args[1:])
        return error


def name_of(model: ExpertModel, number: int) -> str:
    """Model and layers of a family."""
    own = format_ranges([model.numbers[row] for row in model.groups[number].layers])
    return f"model {model.name!r}, layers {own} counted from 0"


@dataclass(frozen=True, eq=False)
class LayerGroupBalancer:
    """Says in every error whose it is."""

    berth: LayerGroupContext
    inner: ExpertBalancer

    def before_step(self, step: int) -> None:
        """See `RebalanceEngine.boundary`."""
        # Every step comes by: a context manager would cost more than the boundary.
        try:
            self.inner.engine.before_step(step)
        except EquipoiseError as error:
            raise self.berth.add_context(error)  # noqa: B904 - it is the same error

    def after_launch(self) -> None:
        """See `RebalanceEngine.after_launch`."""
        self.inner.engine.after_launch()

    def reading(self, row: int, step: int) -> AbstractContextManager[None]:
        """See `LayerLocks.reading`."""
        try:
            gate = self.inner.reading(row, step)
        except EquipoiseError as error:
            raise self.berth.add_context(error)  # noqa: B904 - it is the same error
        return gate if gate is UNLOCKED else self._named(gate)

    def close(self) -> None:
        """See `ExpertBalancer.close`."""
        with self.berth.error_context():
            self.inner.close()

    def reconfigure(self, active_ranks: Sequence[int], step: int) -> "LayerGroupBalancer":
        """See `ExpertBalancer.reconfigure`; layers of `ExpertsLost` are the model's own numbers."""
        try:
            with self.berth.error_context():
                return LayerGroupBalancer(self.berth, self.inner.reconfigure(active_ranks, step))
        except ExpertsLost as lost:
            own = {self.berth.layers[row]: experts for row, experts in lost.gone.items()}
            raise experts_lost(self.berth.model.name, own) from lost

    @contextmanager
    def _named(self, gate: AbstractContextManager[None]) -> Iterator[None]:
        with self.berth.error_context(), gate:
            yield


@dataclass(frozen=True)
class LayerRouter:
    """The router of one layer."""

    family: LayerGroupBalancer
    row: int

    def route(self, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """See `Router.route`: slot ids, int32 [n, top_k], for expert ids of the same shape."""
        return self.family.inner.router.route(self.row, step, ids, on)

    @property
    def generation(self) -> int:
        """Of the tables by which it routes: what a dispatch carries, so that peers can compare."""
        return self.family.inner.installed.generation(self.row)


def experts_lost(model: str, gone: dict[int, tuple[int, ...]]) -> ExpertsLost:
    """Experts that a model has lost, by its own numbers of layers."""
    return ExpertsLost(gone, f"model {model!r}: ")


@dataclass(frozen=True)
class ModelReader:
    """A stream that is attached to every family of a model.

    Attributes:
        readers: one for each family.
    """

    readers: tuple[Reader, ...]

    def detach(self) -> None:
        """See `Reader`."""
        for reader in self.readers:
            reader.detach()


@dataclass(frozen=True, eq=False)
class ModelBalancer:
    """What the serve loop of a model holds. Layers go by the model's own numbers.

    A *step* is what is launched between two boundaries; it enters every layer as often as was
    registered. Steps of one model are counted apart from those of another.
    """

    model: ExpertModel
    families: tuple[LayerGroupBalancer, ...]

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around what launches `step`, on every rank; raises as `RebalanceEngine.boundary` does."""
        self.before_all_layers(step)
        try:
            yield
        finally:
            self.after_launch()

    def before_step(self, step: int) -> None:
        """The same where nothing says when the forward is launched: work beside begins at once."""
        self.before_all_layers(step)
        self.after_launch()

    def before_all_layers(self, step: int) -> None:
        """The boundary before `step` alone; overlapped work begins at `after_launch`.

        Families come in the same order on every rank, because what they issue on the calling
        thread has to be issued alike where communicators are not independent (P4).
        """
        for family in self.families:
            family.before_step(step)

    def after_launch(self) -> None:
        """The forward behind the last boundary is on its way."""
        for family in self.families:
            family.after_launch()

    def reading(self, layer: int, step: int) -> AbstractContextManager[None]:
        """Around everything that one entry of `layer` in `step` launches that reads its slots.

        Raises:
            RegistrationError: no such layer.
            EngineError: steps enter the layer more or less often than was registered.
        """
        family, row = self._seat(layer)
        return family.reading(row, step)

    def router(self, layer: int) -> LayerRouter:
        """For the step path. Raises `RegistrationError`: no such layer."""
        return LayerRouter(*self._seat(layer))

    @property
    def layout(self) -> Layout:
        """What is installed, by row of the model's placement."""
        rows = [row for family in self.families for row in family.berth.family.layers]
        order = np.argsort(rows)
        parts = [family.inner.installed.layout for family in self.families]
        return Layout(
            np.concatenate([part.placement for part in parts])[order],
            np.concatenate([part.shares for part in parts])[order],
        )

    @property
    def ledger(self) -> MemoryReport:
        """What it takes of this rank's device: slots, staging, blobs, tables, counters."""
        inner = self.families[0].inner
        staging = [family.berth.store.layout.staging for family in self.families]
        ranks, parcel = len(inner.context.members.ranks), inner.context.config.slots_per_message
        rounds = RoundOrder.over(inner.components.communicators[0].capabilities)
        device = inner.context.accelerator
        return memory_report(self.model, ranks, staging, parcel, rounds, device)

    def attach(self, stream: Stream) -> Reader:
        """A further stream reads slots or tables of this model; see `ExpertBalancer.attach`."""
        return ModelReader(tuple(family.inner.attach(stream) for family in self.families))

    def close(self) -> None:
        """See `ExpertBalancer.close`; all families, whatever becomes of one."""
        close_all(self.families)

    def reconfigure(self, active_ranks: Sequence[int], step: int) -> "ModelBalancer":
        """See `ExpertBalancer.reconfigure`. This balancer is closed, whatever comes of it.

        Raises:
            ExpertsLost: names everything that the model has lost, in all its families.
        """
        made: list[LayerGroupBalancer] = []
        gone: dict[int, tuple[int, ...]] = {}
        for place, family in enumerate(self.families):
            try:
                made.append(family.reconfigure(active_ranks, step))
            except ExpertsLost as lost:
                gone |= lost.gone
            except BaseException:
                close_quietly([*made, *self.families[place + 1 :]])
                raise
        if gone:
            close_quietly(made)
            raise experts_lost(self.model.name, gone)
        return ModelBalancer(self.model, tuple(made))

    def _seat(self, layer: int) -> tuple[LayerGroupBalancer, int]:
        seat = self._seats.get(layer)
        if seat is None:
            seat = self._homes[self.model.layer(layer)]
            self._seats[layer] = seat
        return seat

    @cached_property
    def _seats(self) -> dict[int, tuple[LayerGroupBalancer, int]]:
        """By the model's own number, as far as was asked for."""
        return {}

    @cached_property
    def _homes(self) -> dict[int, tuple[LayerGroupBalancer, int]]:
        """By row of the model's placement."""
        return {
            layer: (family, row)
            for family in self.families
            for row, layer in enumerate(family.berth.family.layers)
        }


@dataclass(frozen=True, eq=False)
class BalancerSet:
    """Balancers of several models, by name, in one order on every rank."""

    balancers: Mapping[str, ModelBalancer]

    def __iter__(self) -> Iterator[ModelBalancer]:
        return iter(self.balancers.values())

    def __getitem__(self, name: str) -> ModelBalancer:
        if name not in self.balancers:
            raise UsageError(f"no model is named {name!r}; there are: {', '.join(self.balancers)}")
        return self.balancers[name]

    @property
    def ledger(self) -> MemoryReport:
        """What all of them take of this rank's device."""
        return sum((balancer.ledger for balancer in self), MemoryReport())

    def close(self) -> None:
        """End all engines; bounded."""
        close_all(self)

    def reconfigure(self, active_ranks: Sequence[int], steps: Mapping[str, int]) -> "BalancerSet":
        """Go on without the ranks that are gone; collective among `active_ranks`.

        These balancers are closed, whatever comes of it.

        Args:
            active_ranks: numbers on the control plane of those that are left.
            steps: of each model, the next boundary to come.

        Raises:
            UsageError: other models than these; nothing has happened.
            EquipoiseError: as `ExpertBalancer.reconfigure` does, for the first model that cannot.
        """
        if set(steps) != set(self.balancers):
            raise UsageError(f"steps of {sorted(steps)}, not of {sorted(self.balancers)}")
        made: dict[str, ModelBalancer] = {}
        for name, balancer in self.balancers.items():
            try:
                made[name] = balancer.reconfigure(active_ranks, steps[name])
            except BaseException:
                close_quietly([*made.values(), *list(self)[len(made) + 1 :]])
                raise
        return BalancerSet(made)
