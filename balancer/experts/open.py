"""Opens the balancers of all registered models of a rank.

    balancers = open_balancers(accelerator, fabric, models, starts, staging_bytes=64 << 20)
    target = balancers["target"]
    with target.step(n):
        ...
        with target.reading_slots(3, n):
            slots = target.router(3).route(n, ids)

Everything is opened in the same order on every rank: models in the order of the set, then layer
groups in the order of the model. The bytes of staging are divided among the layer groups.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from equipoise.balancer.experts.agreement.same_on_all_ranks import (
    Values,
    check_same_on_all_ranks,
)
from equipoise.balancer.experts.balancer import ExpertBalancer, open_balancer
from equipoise.balancer.experts.closing import close_quietly
from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.context import (
    STAGED_FROM_PEERS,
    InPlaceFromHost,
    StagedFromPeers,
    UpdatePathConfig,
)
from equipoise.balancer.experts.model_balancer import (
    BalancerSet,
    ModelBalancer,
    error_context,
    layer_group_name,
    layer_numbers,
)
from equipoise.balancer.experts.placement import Layout, check_placement
from equipoise.balancer.experts.runtime.events import NO_EVENTS, EventSink
from equipoise.balancer.experts.startup_check import config_values
from equipoise.balancer.experts.weights.expert_weights import ExpertModel, LayerGroup
from equipoise.balancer.experts.weights.memory_spans import ModelSet
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import EngineError, UsageError
from equipoise.hal.slots import SlotStore


def split_staging(groups: Sequence[LayerGroup], staging_bytes: int) -> tuple[int, ...]:
    """Divides `staging_bytes` among layer groups; returns the staging buffers of each.

    A chunk in flight is in staging, so dividing staging bounds the bytes in flight, equally on all
    ranks and without communication between engines. First, all groups together get up to the slots
    of one layer, so that no plan is short of staging. The rest is divided in proportion to the
    bytes of their slots: it lets more layers move at once. No group gets more buffers than slots.

    Raises:
        EngineError: it is less than one buffer for each group.
    """
    least = sum(group.slot_bytes for group in groups)
    if staging_bytes < least:
        raise EngineError(
            f"{staging_bytes} bytes of staging are not enough: one slot of each of {len(groups)} "
            f"layer groups takes {least}"
        )
    layers = [len(group.slots) // len(group.layers) for group in groups]
    of_layers = sum(slots * group.slot_bytes for slots, group in zip(layers, groups, strict=True))
    if staging_bytes < of_layers:
        return tuple(min(slots, staging_bytes // least) for slots in layers)
    remaining_bytes = max(1, sum(group.nbytes for group in groups) - of_layers)
    return tuple(
        min(
            len(group.slots),
            slots + (staging_bytes - of_layers) * (len(group.slots) - slots) // remaining_bytes,
        )
        for slots, group in zip(layers, groups, strict=True)
    )


@dataclass(frozen=True, eq=False)
class LayerGroupContext:
    """A layer group that is being opened, for the factories of update paths and event sinks.

    Attributes:
        accelerator: this rank's device.
        model: the model of the group.
        group_number: number of the group in the model.
        store: its slots. Their numbers are row * slots_per_rank + local slot, where *row* counts
            only the layers of this group.
    """

    accelerator: Accelerator
    model: ExpertModel
    group_number: int
    store: SlotStore

    @property
    def group(self) -> LayerGroup:
        """The layer group."""
        return self.model.groups[self.group_number]

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layer number of each row."""
        return layer_numbers(self.model, self.group_number)

    @property
    def entries(self) -> dict[int, int]:
        """By row, how often every step enters the layer."""
        return {row: self.model.entries_per_step[at] for row, at in enumerate(self.group.layers)}


MEMORY_LOG = logging.getLogger("equipoise.memory")
"""At the start, the first rank logs the device memory that balancing takes."""
UpdatePathFactory = Callable[[LayerGroupContext], UpdatePathConfig]
"""Returns how weights get into the slots of a layer group."""
EventSinkFactory = Callable[[LayerGroupContext], EventSink]
"""Returns the event sink of a layer group."""


@dataclass(frozen=True)
class ModelStart:
    """The start of a model.

    Attributes:
        layout: the layout that its slots hold.
        config: intervals, bounds and modes.
    """

    layout: Layout
    config: BalancerConfig


@dataclass(frozen=True)
class LayerGroupSpec:
    """A layer group to be opened.

    Attributes:
        model: the model.
        group_number: number of the group in the model.
        start: layout and configuration of this group, with its own name and step offset.
        staging: number of staging buffers.
    """

    model: ExpertModel
    group_number: int
    start: ModelStart
    staging: int


def open_balancers(
    accelerator: Accelerator,
    fabric: Fabric,
    models: ModelSet,
    starts: Mapping[str, ModelStart],
    *,
    staging_bytes: int = 0,
    update_path: UpdatePathFactory = lambda group: STAGED_FROM_PEERS,
    event_sinks: EventSinkFactory = lambda group: NO_EVENTS,
) -> BalancerSet:
    """Opens the balancers of all models; collective.

    Args:
        accelerator: this rank's device.
        fabric: this rank's connection to the other ranks.
        models: finalized models, the same on every rank.
        starts: the start of each model, by name.
        staging_bytes: bytes of staging over all layer groups of all models, which bounds the bytes
            in flight; 0 if all groups are rewritten in place.
        update_path: returns how weights get into the slots of a layer group.
        event_sinks: returns the event sink of a layer group.

    Raises:
        UsageError: there is not one start per model.
        RanksDiffer: ranks registered or configured different things; nothing is opened.
        PlacementError: a layout does not fit its model.
        EngineError: there are too few staging bytes.
        Unsupported: the accelerator lacks what a path needs.
    """
    _check(models, starts, fabric.control.size)
    parts = layer_group_specs(models, starts, staging_bytes)
    _check_same(fabric.control, parts)
    opened: dict[str, list[ExpertBalancer]] = {model.name: [] for model in models}
    try:
        for part in parts:
            opened[part.model.name].append(
                _open_group(accelerator, fabric, part, update_path, event_sinks)
            )
    except BaseException:
        close_quietly(chain.from_iterable(opened.values()))
        raise
    balancers = BalancerSet(
        {model.name: ModelBalancer(model, tuple(opened[model.name])) for model in models}
    )
    if fabric.control.rank == 0:
        MEMORY_LOG.info("device memory of a rank:\n%s", balancers.memory_report)
    return balancers


def layer_group_specs(
    models: ModelSet, starts: Mapping[str, ModelStart], staging_bytes: int
) -> tuple[LayerGroupSpec, ...]:
    """Returns all layer groups to open. Raises `EngineError` for too few staging bytes."""
    locations = [(model, number) for model in models for number in range(len(model.groups))]
    groups = [model.groups[number] for model, number in locations]
    staging = split_staging(groups, staging_bytes) if staging_bytes else (0,) * len(groups)
    return tuple(
        LayerGroupSpec(
            model,
            number,
            _group_start(starts[model.name], model, number, position, len(locations)),
            buffers,
        )
        for position, ((model, number), buffers) in enumerate(zip(locations, staging, strict=True))
    )


def _group_start(
    start: ModelStart, model: ExpertModel, number: int, position: int, count: int
) -> ModelStart:
    """Returns the start of one layer group, with a unique name and its own step offset.

    Offsets are spread over the interval, so that engines do not move weights at once.
    """
    config, rows = start.config, list(model.groups[number].layers)
    sums = config.step_interval // config.sub_window
    later = position * sums // count * config.sub_window
    label = f"{config.name}[{model.name}:{number}]"  # brackets: "m.1" is a shrunk group's
    phase = (config.step_offset + later) % config.step_interval
    placement, shares = (
        np.ascontiguousarray(array[rows]) for array in (start.layout.placement, start.layout.shares)
    )
    return ModelStart(Layout(placement, shares), replace(config, name=label, step_offset=phase))


def _open_group(
    accelerator: Accelerator,
    fabric: Fabric,
    part: LayerGroupSpec,
    update_path: UpdatePathFactory,
    event_sinks: EventSinkFactory,
) -> ExpertBalancer:
    model, start = part.model, part.start
    layers = model.groups[part.group_number]
    store = accelerator.slot_store(layers.layout(part.staging))
    group = LayerGroupContext(accelerator, model, part.group_number, store)
    with error_context(layer_group_name(model, part.group_number)):
        path = _complete_path(update_path(group), group)
        shape = replace(model.shape(fabric.control.size), layers=len(layers.layers))
        ends, event_sink = (accelerator, fabric, store, shape), event_sinks(group)
        return open_balancer(*ends, start.layout, start.config, path, event_sink=event_sink)


def _complete_path(path: UpdatePathConfig, group: LayerGroupContext) -> UpdatePathConfig:
    """Adds the registered entries to an in-place path; refuses a staged one without staging."""
    if isinstance(path, InPlaceFromHost):
        return replace(path, entries_per_step=group.entries)
    if isinstance(path, StagedFromPeers) and not group.store.layout.staging:
        raise EngineError("the staged path needs a budget of staging")
    return path


def _check(models: ModelSet, starts: Mapping[str, ModelStart], ranks: int) -> None:
    """Raise `UsageError` for other models, `PlacementError` for another model's layout."""
    if set(starts) != {model.name for model in models}:
        raise UsageError(f"starts of {sorted(starts)} for {[model.name for model in models]}")
    for model in models:
        try:
            check_placement(starts[model.name].layout.placement, model.shape(ranks))
        except EngineError as error:
            error.args = (f"model {model.name!r}: {error}",)
            raise


def _check_same(control: ControlPlane, parts: tuple[LayerGroupSpec, ...]) -> None:
    """See that all ranks mean the same before anything is opened. Raises `RanksDiffer`."""
    config = parts[0].start.config
    mine = {
        f"model {part.model.name!r}, layer group {part.group_number}": _values(part)
        for part in parts
    }
    check_same_on_all_ranks(control, f"{config.name}/open", config.timeout, mine)


def _values(part: LayerGroupSpec) -> Values:
    """What has to be the same on all ranks."""
    return {
        "registration": f"{part.model.group_line(part.group_number)} ({part.model.digest})",
        "layout": part.start.layout.digest,
        **config_values(part.start.config),
        "staging": str(part.staging),
    }
