"""`open_balancer`: a model's balancer with sensible defaults, and with listeners if wanted."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.model_balancer import ModelBalancer
from equipoise.balancer.experts.open import LayerGroupContext, ModelStart, open_balancers
from equipoise.balancer.experts.placement import (
    Layout,
    Placement,
    Shares,
    check_placement,
    even_shares,
    format_ranges,
    initial_placement,
)
from equipoise.balancer.experts.planning.inputs import array_of
from equipoise.balancer.experts.runtime.events import NO_EVENTS, Event, EventSink
from equipoise.balancer.experts.weights.expert_weights import (
    ExpertModel,
    LayerGroup,
)
from equipoise.balancer.experts.weights.memory_spans import ModelSet
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.statistics import LayerNumbering
from equipoise.balancer.observe.async_sink import AsyncEventSink
from equipoise.balancer.observe.log_lines import log_sinks
from equipoise.balancer.observe.metrics import PrometheusSink
from equipoise.connection import Connection
from equipoise.hal.arguments import check_type, short_text, whole_number
from equipoise.hal.errors import ConfigError, PlacementError, RegistrationError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


@runtime_checkable
class Placed(Protocol):
    """A placement with shares: a `Plan`, an `ExpertPlacement` or a `Layout`."""

    @property
    def placement(self) -> Placement:
        """int32 (layers, slots)."""
        ...

    @property
    def shares(self) -> Shares:
        """int32 (layers, slots), in 1 / 65536."""
        ...


def open_balancer(
    ranks: Connection,
    model: ExpertModel,
    config: BalancerConfig | None = None,
    *,
    placement: Placed | npt.ArrayLike | None = None,
    staging_bytes: int | None = None,
    events: Callable[[Event], object] | None = None,
    metrics: "CollectorRegistry | None" = None,
) -> ModelBalancer:
    """Start balancing a model; every rank calls it, with the same arguments.

    The slots of the model hold the experts that `placement` says. From now on call
    `with balancer.step(n):` around what launches step n, on every rank and for n = 0, 1, 2, ...

    Args:
        ranks: of the run; they divide the slots of each layer evenly.
        model: from `ModelRegistry.finalize`.
        config: cadence, share mode and bounds; `BalancerConfig()` where nothing is given.
        placement: what the slots hold: an integer array (layers, slots), the expert in each slot,
            whose replicas take even shares; or a `Plan` or an `ExpertPlacement`, with its shares.
            An `ExpertPlacement` is matched by the model's layer numbers, or by position where its
            file numbers no layers. By default `initial_placement`.
        staging_bytes: device memory for weights on their way, on each rank. By default as much as
            one layer of the largest layer group takes; a rebalance that changes more goes in parts.
        events: called with what happens (the classes of `equipoise.events`), in order, on a thread
            of its own. Its errors are logged once and counted.
        metrics: a registry of prometheus_client in which the balancer's metrics appear.

    Raises:
        RanksDiffer: a rank passes something else; nothing is opened anywhere.
        ConfigError: `config`, `staging_bytes`, `events` or `metrics` cannot be what they are.
        RegistrationError: `model` is not from `ModelRegistry.finalize`.
        PlacementError: the placement is not of this model on so many ranks.
        EngineError: less staging than a slot of each layer group.
        Unsupported: the accelerator lacks what moving weights takes.
        MetricsMissing: metrics are asked for, and prometheus_client is not installed.
    """
    _check_arguments(ranks, model, config, events, metrics)
    if staging_bytes is not None:
        staging_bytes = whole_number("staging_bytes", staging_bytes, ConfigError)
    config = BalancerConfig(timeout=ranks.deadline) if config is None else config
    config = replace(config, name=config.name or model.name)
    sinks = _Sinks(config, ranks.rank, events, metrics)
    start = ModelStart(_layout(model, placement, ranks.size), config)
    try:
        balancers = open_balancers(
            ranks.accelerator,
            ranks.fabric,
            ModelSet((model,)),
            {model.name: start},
            staging_bytes=_staging_bytes(model.groups) if staging_bytes is None else staging_bytes,
            event_sinks=sinks,
        )
    except BaseException:
        sinks.close()
        raise
    return replace(balancers[model.name], sinks=tuple(sinks.opened))


class _Sinks:
    """An event sink for each layer group, where anybody listens: a thread of its own each."""

    def __init__(
        self,
        config: BalancerConfig,
        rank: int,
        events: Callable[[Event], object] | None,
        metrics: "CollectorRegistry | None",
    ) -> None:
        self._config = config
        self._rank = rank
        self._events = events
        self._metrics = metrics
        self.opened: list[AsyncEventSink] = []

    def __call__(self, group: LayerGroupContext) -> EventSink:
        is_observed = self._events or self._metrics or self._config.log_balancedness
        if not is_observed:
            return NO_EVENTS
        label = f"{self._config.name}.{group.group_number}"
        sinks: list[EventSink] = [*log_sinks(replace(self._config, name=label), self._rank)]
        if self._metrics is not None:
            sinks.append(PrometheusSink(self._metrics, label))
        if self._events is not None:
            sinks.append(_Listening(self._events))
        self.opened.append(AsyncEventSink(sinks))
        return self.opened[-1]

    def close(self) -> None:
        for sink in self.opened:
            sink.close()


class _Listening:
    """A callable as an event sink."""

    def __init__(self, listener: Callable[[Event], object]) -> None:
        self._listener = listener

    def emit(self, event: Event) -> None:
        self._listener(event)

    def close(self) -> None:
        """Nothing of its own."""


def _check_arguments(
    ranks: object, model: object, config: object, events: object, metrics: object
) -> None:
    """Raises `ConfigError`, or `RegistrationError` for the model."""
    check_type("ranks", ranks, Connection, ConfigError)
    hint = "; ModelRegistry.finalize returns one"
    check_type("model", model, ExpertModel, RegistrationError, hint)
    if config is not None:
        check_type("config", config, BalancerConfig, ConfigError)
    if events is not None and not callable(events):
        raise ConfigError(f"events must be callable, got {short_text(events)}")
    if metrics is not None and not hasattr(metrics, "register"):
        got = short_text(metrics)
        raise ConfigError(f"metrics must be a CollectorRegistry of prometheus_client, got {got}")


def _layout(model: ExpertModel, placement: Placed | npt.ArrayLike | None, ranks: int) -> Layout:
    """What the slots hold, and shares. Raises `PlacementError`."""
    shape = model.shape(ranks)
    if placement is None:
        placement = initial_placement(shape)
    if isinstance(placement, ExpertPlacement):
        rows = _layer_rows(model, placement, ranks)
        return Layout(placement.placement[rows], placement.shares[rows])
    if isinstance(placement, Placed):
        return Layout(placement.placement, placement.shares)
    array = array_of("placement", placement)
    if array.dtype.kind not in "iu":
        raise PlacementError(f"a placement is an array of integers, not of {array.dtype}")
    # Before numbers are cut to 32 bits, and may look right.
    inside = (array >= 0) & (array < model.experts)
    slot_experts = np.ascontiguousarray(np.where(inside, array, -1), dtype=np.int32)
    check_placement(slot_experts, shape)
    return Layout(slot_experts, even_shares(slot_experts, model.experts))


def _layer_rows(model: ExpertModel, placement: ExpertPlacement, ranks: int) -> list[int]:
    """The row of the placement of each layer of the model, as `equipoise plan --installed` does.

    Raises `PlacementError` for another number of ranks, and for a layer that it does not have.
    """
    origin = f" ({placement.source})" if placement.source else ""
    if placement.ranks != ranks:
        raise PlacementError(
            f"placement{origin} is of {placement.ranks} ranks, the run has {ranks}"
        )
    if placement.numbering is LayerNumbering.UNKNOWN and len(placement.layers) == model.layers:
        return list(range(model.layers))
    row_of_layer = {layer: row for row, layer in enumerate(placement.layers)}
    for layer in model.layer_numbers:
        if layer not in row_of_layer:
            raise PlacementError(
                f"placement{origin} has no layer {layer}, which model {model.name!r} has: it is of "
                f"layers {format_ranges(list(placement.layers))}"
            )
    return [row_of_layer[layer] for layer in model.layer_numbers]


def _staging_bytes(groups: tuple[LayerGroup, ...]) -> int:
    """One layer of the largest group, and one slot of each group at least."""
    layer = max(group.nbytes // len(group.layers) for group in groups)
    return max(layer, sum(group.slot_bytes for group in groups))
