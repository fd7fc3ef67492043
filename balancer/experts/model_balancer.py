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
from equipoise.balancer.experts.placement import Layout, Load, format_ranges
from equipoise.balancer.experts.routing.routers import Router
from equipoise.balancer.experts.runtime.events import EventSink
from equipoise.balancer.experts.transfer.layer_locks import UNLOCKED
from equipoise.balancer.experts.weights.expert_weights import ExpertModel
from equipoise.balancer.experts.weights.memory_report import MemoryReport, RoundOrder, memory_report
from equipoise.hal.errors import EquipoiseError, ExpertsLost, UsageError
from equipoise.hal.routing import DispatchCounts
from equipoise.hal.slots import Reader
from equipoise.hal.stream import Stream


def layer_numbers(model: ExpertModel, number: int) -> tuple[int, ...]:
    """Returns the model's layer numbers of a layer group."""
    return tuple(model.layer_numbers[row] for row in model.groups[number].layers)


def layer_group_name(model: ExpertModel, number: int) -> str:
    """Returns the name of a layer group for errors; its engine numbers its layers from 0."""
    own = format_ranges(list(layer_numbers(model, number)))
    return f"model {model.name!r}, layers {own} counted from 0"


@contextmanager
def error_context(name: str) -> Iterator[None]:
    """Adds `name` to errors that are raised inside."""
    try:
        yield
    except EquipoiseError as error:
        raise add_context(error, name)  # noqa: B904 - it is the same error


def add_context(error: EquipoiseError, name: str) -> EquipoiseError:
    """Adds `name` to an error, once, and returns the error."""
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
        """Returns slot ids, int32 [n, top_k], for expert ids of the same shape; see `Router`."""
        return self.router.route(self.row, step, ids, on)

    def dispatch_counts(self) -> DispatchCounts | None:
        """Returns what all ranks send by the last `route`, for `VariableSizeExchange.prepare`.

        With `exact` shares that saves the collective by which ranks tell each other sizes. None
        where the router does not know it. Called by the thread that called `route`, before another
        layer of the group is routed; it waits for the counts of other ranks, at most `timeout`
        seconds.

        Raises:
            EngineError: another layer was routed since.
            CommunicatorError: the counts did not come in time.
        """
        return self.router.dispatch_counts(self.row)

    @property
    def generation(self) -> int:
        """Generation of the routing tables, which a dispatch carries so that peers can compare."""
        return self.installed.generation(self.row)


@dataclass(frozen=True)
class ModelReader:
    """A stream that is attached to every layer group of a model.

    Attributes:
        readers: the reader of each layer group.
    """

    readers: tuple[Reader, ...]

    def detach(self) -> None:
        """See `Reader`."""
        for reader in self.readers:
            reader.detach()


@dataclass(frozen=True, eq=False)
class ModelBalancer:
    """The balancer of a model, for its serve loop. Layers have the model's own numbers.

    A *step* is what is launched between two boundaries; it enters every layer as often as
    registered. Each model counts its own steps. Errors name the model and the layers of the group
    that raised them. A context manager, which closes the
    balancer.

    Attributes:
        model: the model.
        groups: the balancer of each layer group, in their order.
        sinks: told what happens; closed after the engines.
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
            VoteOutcomeUnknown: the outcome of a vote cannot be learnt; this rank must stop.
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
        """Runs the boundary before `step`; jobs start in `after_launch`.

        Layer groups have the same order on all ranks: if communicators are not independent, what
        they issue on the calling thread has to have one order (P4).
        """
        for number, group in enumerate(self.groups):
            # Every step runs this: a context manager would cost more than the boundary itself.
            try:
                group.engine.before_step(step)
            except EquipoiseError as error:
                raise add_context(error, self._names[number])  # noqa: B904 - it is the same error

    def after_launch(self) -> None:
        """Prepares the next boundary, once the forward pass is launched."""
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
        number, row = self._locate(layer)
        try:
            lock = self.groups[number].reading_slots(row, step)
        except EquipoiseError as error:
            raise add_context(error, self._names[number])  # noqa: B904 - it is the same error
        return lock if lock is UNLOCKED else self._inside(lock, number)

    def router(self, layer: int) -> LayerRouter:
        """The router of a layer: from the experts that a gate picks to slots, by the shares.

        Its `route(step, ids)` returns the global slot of each row, int32 [tokens, top_k], for
        expert ids of that shape on the device, and counts the load; it is launched on the compute
        stream. Its `generation` goes with a dispatch, so that peers can compare; its
        `dispatch_counts()` tell a `VariableSizeExchange` its sizes where the router knows them.

        Args:
            layer: the model's own number.

        Raises:
            RegistrationError: no such layer.
        """
        number, row = self._locate(layer)
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
        """Memory of this rank's device: slots, staging, messages, tables, counters. As text a
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

        Every rank closes after the same step; nobody waits for another. A rebalance under way is
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
        """Go on without lost ranks; collective among `active_ranks`.

        This balancer is closed, whatever comes of it; go on with the one that is returned.

        Args:
            active_ranks: numbers of the ranks that are left.
            step: the next step to come.

        Raises:
            ExpertsLost: names everything that the model has lost, in all its layer groups.
        """
        balancers: list[ExpertBalancer] = []
        lost_experts: dict[int, tuple[int, ...]] = {}
        for number, group in enumerate(self.groups):
            try:
                with error_context(self._names[number]):
                    balancers.append(group.reconfigure(active_ranks, step))
            except ExpertsLost as lost:
                layers = layer_numbers(self.model, number)
                lost_experts |= {layers[row]: experts for row, experts in lost.lost_experts.items()}
            except BaseException:
                close_quietly([*balancers, *self.groups[number + 1 :]])
                raise
        if lost_experts:
            close_quietly(balancers)
            raise ExpertsLost(lost_experts, f"model {self.model.name!r}: ")
        return ModelBalancer(self.model, tuple(balancers), self.sinks)

    def _close(self, number: int) -> None:
        with error_context(self._names[number]):
            self.groups[number].close()

    @contextmanager
    def _inside(self, lock: AbstractContextManager[None], number: int) -> Iterator[None]:
        with error_context(self._names[number]), lock:
            yield

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """Names of the layer groups in errors."""
        return tuple(layer_group_name(self.model, number) for number in range(len(self.groups)))

    def _locate(self, layer: int) -> tuple[int, int]:
        """Returns the group of a layer, and its row in the group."""
        location = self._location_cache.get(layer)
        if location is None:
            location = self._location_cache[layer] = self._rows[self.model.layer(layer)]
        return location

    @cached_property
    def _location_cache(self) -> dict[int, tuple[int, int]]:
        """Cache by the model's layer number: this runs for every layer of every step."""
        return {}

    @cached_property
    def _rows(self) -> dict[int, tuple[int, int]]:
        """Group and row in it, by row of the model's placement."""
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
        """Device memory of this rank for all models."""
        return sum((balancer.memory_report for balancer in self), MemoryReport())

    def close(self) -> None:
        """Closes all balancers; bounded."""
        close_all(self)

    def reconfigure(self, active_ranks: Sequence[int], steps: Mapping[str, int]) -> "BalancerSet":
        """Continues without lost ranks; collective among `active_ranks`. These are closed.

        Args:
            active_ranks: control-plane numbers of the remaining ranks.
            steps: the next boundary of each model.

        Raises:
            UsageError: `steps` names other models; nothing has happened.
            EquipoiseError: as `ExpertBalancer.reconfigure`, for the first model that fails.
        """
        if set(steps) != set(self.balancers):
            raise UsageError(f"steps of {sorted(steps)}, not of {sorted(self.balancers)}")
        balancers: dict[str, ModelBalancer] = {}
        for name, balancer in self.balancers.items():
            try:
                balancers[name] = balancer.reconfigure(active_ranks, steps[name])
            except BaseException:
                close_quietly([*balancers.values(), *list(self)[len(balancers) + 1 :]])
                raise
        return BalancerSet(balancers)
