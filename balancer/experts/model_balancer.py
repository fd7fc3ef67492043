"""The balancer of one model on one rank, and the set of all models of a rank.

One engine per layer group, one step counter per model.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import TracebackType
from typing import Self

import numpy as np
from torch import Tensor

from equipoise.balancer.experts.balancer import ExpertBalancer
from equipoise.balancer.experts.closing import close_all, close_quietly
from equipoise.balancer.experts.engine.serving_state import ServingState
from equipoise.balancer.experts.engine.states import RebalanceReport
from equipoise.balancer.experts.placement import Layout, Load
from equipoise.balancer.experts.routing.routers import Router
from equipoise.balancer.experts.runtime.events import EventSink
from equipoise.balancer.experts.transfer.layer_locks import UNLOCKED
from equipoise.balancer.experts.weights.expert_weights import ExpertModel, format_ranges
from equipoise.balancer.experts.weights.memory_report import MemoryReport, RoundOrder, memory_report
from equipoise.hal.errors import EquipoiseError, ExpertsLost, UsageError
from equipoise.hal.slots import Reader
from equipoise.hal.stream import Stream


def layer_numbers(model: ExpertModel, number: int) -> tuple[int, ...]:
    """The model's own numbers of the layers of a layer group."""
    return tuple(model.layer_numbers[row] for row in model.groups[number].layers)


def layer_group_name(model: ExpertModel, number: int) -> str:
    """Model and layers of a layer group, for errors: its engine counts its layers from 0."""
    own = format_ranges(list(layer_numbers(model, number)))
    return f"model {model.name!r}, layers {own} counted from 0"


@contextmanager
def error_context(name: str) -> Iterator[None]:
    """Errors that are raised inside say whose they are."""
    try:
        yield
    except EquipoiseError as error:
        raise add_context(error, name)  # noqa: B904 - it is the same error


def add_context(error: EquipoiseError, name: str) -> EquipoiseError:
    """The same error, which says whose it is, once."""
    if not str(error).startswith(name):
        error.args = (f"{name}: {error}", *error.args[1:])
    return error


@dataclass(frozen=True)
class LayerRouter:
    """The router of one layer."""

    router: Router
    installed: ServingState
    row: int

    def route(self, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """See `Router.route`: slot ids, int32 [n, top_k], for expert ids of the same shape."""
        return self.router.route(self.row, step, ids, on)

    @property
    def generation(self) -> int:
        """Of the tables by which it routes: what a dispatch carries, so that peers can compare."""
        return self.installed.generation(self.row)


@dataclass(frozen=True)
class ModelReader:
    """A stream that is attached to every layer group of a model.

    Attributes:
        readers: one for each layer group.
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
    registered. Steps of one model are counted apart from those of another. Errors name the model
    and the layers of the group in which they were raised. A context manager, which closes the
    balancer.

    Attributes:
        model: that is served.
        groups: a balancer for each of its layer groups, in their order.
        sinks: told what happens; closed behind the engines.
    """

    model: ExpertModel
    groups: tuple[ExpertBalancer, ...]
    sinks: tuple[EventSink, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Behind an error, what closing raises is a consequence, and must not hide it.
        if error is None:
            self.close()
        else:
            close_quietly([self])

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A context around what launches step number `step`; every rank enters it for every step.

        On entry the engine settles the vote of the step before and acts on it: a commit is launched
        here, so that this step reads the new weights. On exit planning, transfers and the next vote
        begin, overlapped with what was launched. Most boundaries have nothing to do.

        Args:
            step: 0, 1, 2, ... without gaps, the same on every rank.

        Raises:
            AgreementLost: the outcome of a vote cannot be learnt; this rank must stop.
            EngineError: a step was left out, or the balancer was closed.
        """
        self._before_step(step)
        try:
            yield
        finally:
            self.after_launch()

    def before_step(self, step: int) -> None:
        """As `step`, where nothing says when the forward is launched: work that overlaps with it
        begins at once."""
        self._before_step(step)
        self.after_launch()

    def _before_step(self, step: int) -> None:
        """The boundary before `step` alone; overlapped work begins at `after_launch`.

        Layer groups come in the same order on every rank, because what they issue on the calling
        thread has to be issued alike where communicators are not independent (P4).
        """
        for number, group in enumerate(self.groups):
            # Every step comes by: a context manager would cost more than the boundary.
            try:
                group.engine.before_step(step)
            except EquipoiseError as error:
                raise add_context(error, self._names[number])  # noqa: B904 - it is the same error

    def after_launch(self) -> None:
        """The forward behind the last boundary is on its way."""
        for group in self.groups:
            group.engine.after_launch()

    def reading_slots(self, layer: int, step: int) -> AbstractContextManager[None]:
        """A context around everything that one entry of `layer` launches that reads its slots.

        Args:
            layer: the model's own number.
            step: of the `step` around it.

        Raises:
            RegistrationError: no such layer.
            EngineError: steps enter the layer more or less often than was registered.
        """
        number, row = self._place(layer)
        try:
            lock = self.groups[number].reading_slots(row, step)
        except EquipoiseError as error:
            raise add_context(error, self._names[number])  # noqa: B904 - it is the same error
        return lock if lock is UNLOCKED else self._inside(lock, number)

    def router(self, layer: int) -> LayerRouter:
        """The router of a layer: from the experts that a gate picks to slots, by the shares.

        Its `route(step, ids)` returns the global slot of each row, int32 [tokens, top_k], for
        expert ids of that shape on the device, and counts the load; it is launched on the compute
        stream. Its `generation` goes with a dispatch, so that peers can compare.

        Args:
            layer: the model's own number.

        Raises:
            RegistrationError: no such layer.
        """
        number, row = self._place(layer)
        group = self.groups[number]
        return LayerRouter(group.router, group.serving_state, row)

    @property
    def layout(self) -> Layout:
        """What is installed, by row of the model's placement: `placement`, int32 (layers, slots),
        the expert in each slot of all ranks, and `shares`, int32 alike, in 1 / 65536."""
        rows = [row for group in self.model.groups for row in group.layers]
        order = np.argsort(rows)
        parts = [group.serving_state.layout for group in self.groups]
        return Layout(
            np.concatenate([part.placement for part in parts])[order],
            np.concatenate([part.shares for part in parts])[order],
        )

    @property
    def load(self) -> Load | None:
        """Rows by expert in the last sub-window that was summed, over all ranks: int64 (layers,
        experts), by row of the model's placement. None before the first sum."""
        if not all(group.load.sums for group in self.groups):
            return None
        rows = [row for group in self.model.groups for row in group.layers]
        latest: Load = np.concatenate([group.load.latest for group in self.groups])
        return latest[np.argsort(rows)]

    def imbalance(self) -> float:
        """Imbalance (max / mean - 1 of the rows per rank, mean over layers) of `load` under what is
        installed; nan before the first sum. Never collective."""
        layers = [len(group.layers) for group in self.model.groups]
        return float(np.average([group.imbalance() for group in self.groups], weights=layers))

    @property
    def reports(self) -> tuple[RebalanceReport, ...]:
        """How the latest rebalances ended, at most 1,024 of each layer group, oldest first.

        Each has `step`, the boundary at which it ended; `outcome`: `committed`, `unchanged` or the
        reason of the abort; `slots` and `bytes`, copied between ranks over all of them.
        """
        every = chain.from_iterable(group.engine.reports for group in self.groups)
        return tuple(sorted(every, key=lambda report: report.step))

    @property
    def aborts(self) -> Counter[str]:
        """How many rebalances were aborted, by reason."""
        return sum((Counter(group.engine.aborts) for group in self.groups), Counter[str]())

    @property
    def counters(self) -> tuple[Tensor, ...]:
        """By layer group, int32 [layers, experts]: this rank's rows in the open sub-window."""
        return tuple(group.load.counters for group in self.groups)

    @property
    def memory_report(self) -> MemoryReport:
        """What it takes of this rank's device: slots, staging, blobs, tables, counters. As text a
        table; `total` is bytes."""
        context, communicators = self.groups[0].context, self.groups[0].communicators
        return memory_report(
            self.model,
            len(context.members.ranks),
            [group.context.store.layout.staging for group in self.groups],
            context.config.slots_per_message,
            RoundOrder.of_communicator(communicators[0].capabilities),
            context.accelerator,
        )

    def attach(self, stream: Stream) -> Reader:
        """A further stream reads slots or tables of this model: every change waits for what it has
        launched, until the result's `detach()`."""
        return ModelReader(tuple(group.attach(stream) for group in self.groups))

    def close(self) -> None:
        """End the engines and give back their communicators; again is harmless.

        Every rank closes behind the same step; nobody waits for another. A rebalance under way is
        left; the installed placement stays.

        Raises:
            StreamTimeout: the compute stream did not come to its end.
            StreamError, CommunicatorError: what the stream, or the last sum of loads, failed with.
        """
        with ExitStack() as ends:
            # The last is closed first: sinks hear that the engines are closed.
            for sink in self.sinks:
                ends.callback(sink.close)
            for number in range(len(self.groups)):
                ends.callback(self._close, number)

    def reconfigure(self, active_ranks: Sequence[int], step: int) -> "ModelBalancer":
        """Go on without the ranks that are gone; collective among `active_ranks`.

        This balancer is closed, whatever comes of it; go on with the one that is returned.

        Args:
            active_ranks: numbers of the ranks that are left.
            step: the next step to come.

        Raises:
            ExpertsLost: names everything that the model has lost, in all its layer groups.
        """
        made: list[ExpertBalancer] = []
        gone: dict[int, tuple[int, ...]] = {}
        for number, group in enumerate(self.groups):
            try:
                with error_context(self._names[number]):
                    made.append(group.reconfigure(active_ranks, step))
            except ExpertsLost as lost:
                layers = layer_numbers(self.model, number)
                gone |= {layers[row]: experts for row, experts in lost.lost_experts.items()}
            except BaseException:
                close_quietly([*made, *self.groups[number + 1 :]])
                raise
        if gone:
            close_quietly(made)
            raise ExpertsLost(gone, f"model {self.model.name!r}: ")
        return ModelBalancer(self.model, tuple(made), self.sinks)

    def _close(self, number: int) -> None:
        with error_context(self._names[number]):
            self.groups[number].close()

    @contextmanager
    def _inside(self, lock: AbstractContextManager[None], number: int) -> Iterator[None]:
        with error_context(self._names[number]), lock:
            yield

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """Of the layer groups, in errors."""
        return tuple(layer_group_name(self.model, number) for number in range(len(self.groups)))

    def _place(self, layer: int) -> tuple[int, int]:
        """The group of a layer, and its row there."""
        place = self._places.get(layer)
        if place is None:
            place = self._places[layer] = self._rows[self.model.layer(layer)]
        return place

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """By the model's own number, as far as was asked for."""
        return {}

    @cached_property
    def _rows(self) -> dict[int, tuple[int, int]]:
        """By row of the model's placement."""
        return {
            layer: (number, row)
            for number, group in enumerate(self.model.groups)
            for row, layer in enumerate(group.layers)
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
    def memory_report(self) -> MemoryReport:
        """What all of them take of this rank's device."""
        return sum((balancer.memory_report for balancer in self), MemoryReport())

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
