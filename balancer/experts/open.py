"""From registered models to running balancers.

    balancers = open_balancers(accelerator, fabric, models, starts, budget=64 << 20)
    target = balancers["target"]
    with target.step(n):
        ...
        with target.reading(3, n):
            slots = target.router(3).route(n, ids)

Everything is opened in one order on every rank: models as the set has them, then layer groups as
the model has them. The bytes in flight are divided among the layer groups.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise.balancer.experts.agreement.same_on_all_ranks import (
    Values,
    check_same_on_all_ranks,
)
from equipoise.balancer.experts.balancer import open_balancer
from equipoise.balancer.experts.builder import (
    STAGED_FROM_PEERS,
    InPlaceFromHost,
    StagedFromPeers,
    UpdatePathConfig,
)
from equipoise.balancer.experts.closing import close_quietly
from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.model_balancer import (
    BalancerSet,
    LayerGroupBalancer,
    LayerGroupContext,
    ModelBalancer,
)
from equipoise.balancer.experts.placement import Layout, check_placement
from equipoise.balancer.experts.runtime.events import NO_EVENTS, EventSink
from equipoise.balancer.experts.startup_check import config_values
from equipoise.balancer.experts.weights.expert_weights import ExpertModel, LayerGroup
from equipoise.balancer.experts.weights.memory_spans import ModelSet
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import EngineError, UsageError


def split_staging(families: Sequence[LayerGroup], budget: int) -> tuple[int, ...]:
    """Staging buffers of each family, in at most `budget` bytes over all of them.

    What is in flight is what is staged, so that dividing the staging divides the budget, alike on
    every rank and without a word between engines. A layer is planned with as many buffers as its
    family has, so all families come up to the slots of a layer first, together: then no plan is
    short of staging. What is left goes by bytes of slots: it lets more layers move at once. No
    family gets more buffers than slots.

    Raises:
        EngineError: less than one buffer each.
    """
    least = sum(family.slot_bytes for family in families)
    if budget < least:
        raise EngineError(
            f"{budget} bytes of staging are not enough: one slot of each of {len(families)} "
            f"families takes {least}"
        )
    layers = [len(family.slots) // len(family.layers) for family in families]
    of_layers = sum(
        slots * family.slot_bytes for slots, family in zip(layers, families, strict=True)
    )
    if budget < of_layers:
        return tuple(min(slots, budget // least) for slots in layers)
    rest = max(1, sum(family.nbytes for family in families) - of_layers)
    return tuple(
        min(len(family.slots), slots + (budget - of_layers) * (len(family.slots) - slots) // rest)
        for slots, family in zip(layers, families, strict=True)
    )


MEMORY = logging.getLogger("equipoise.memory")
"""Told at the start, by the first rank, what balancing takes."""
UpdatePath = Callable[[LayerGroupContext], UpdatePathConfig]
"""How weights come into the slots of a family."""
EventSinks = Callable[[LayerGroupContext], EventSink]
"""Who is told what happens to a family."""


@dataclass(frozen=True)
class ModelStart:
    """How a model begins.

    Attributes:
        layout: what its slots hold, by row of its placement.
        config: cadence and bounds.
    """

    layout: Layout
    config: BalancerConfig


@dataclass(frozen=True)
class LayerGroupSpec:
    """A family that is to be opened.

    Attributes:
        model: whose.
        number: of the family in the model.
        start: of this family alone, with a label and a phase of its own.
        staging: buffers.
    """

    model: ExpertModel
    number: int
    start: ModelStart
    staging: int


def open_balancers(
    accelerator: Accelerator,
    fabric: Fabric,
    models: ModelSet,
    starts: Mapping[str, ModelStart],
    *,
    budget: int = 0,
    way: UpdatePath = lambda berth: STAGED_FROM_PEERS,
    journals: EventSinks = lambda berth: NO_EVENTS,
) -> BalancerSet:
    """Put balancers of all models together; collective.

    Args:
        accelerator: this rank's device.
        fabric: this rank's connection to the others.
        models: finalized; the same on every rank.
        starts: by model.
        budget: bytes of staging over all families of all models, hence of weights in flight; 0
            where no family takes any, because all are rewritten under locks.
        way: how weights come into the slots of a family.
        journals: one a family, told what happens to it.

    Raises:
        UsageError: not one start a model.
        AgreementLost: a rank has registered or configured something else; nothing is opened.
        PlacementError: a layout is not of its model.
        EngineError: the budget is too small.
        Unsupported: the accelerator lacks what a path needs.
    """
    _check(models, starts, fabric.control.size)
    parts = layer_group_specs(models, starts, budget)
    _check_same(fabric.control, parts)
    opened: list[LayerGroupBalancer] = []
    try:
        for part in parts:
            opened.append(_open(accelerator, fabric, part, way, journals))
    except BaseException:
        close_quietly(opened)
        raise
    return _told(BalancerSet({model.name: _balancer(model, opened) for model in models}), fabric)


def _told(opened: BalancerSet, fabric: Fabric) -> BalancerSet:
    """The same, when the first rank has said what they take."""
    if fabric.control.rank == 0:
        MEMORY.info("device memory of a rank:\n%s", opened.ledger)
    return opened


def layer_group_specs(
    models: ModelSet, starts: Mapping[str, ModelStart], budget: int
) -> tuple[LayerGroupSpec, ...]:
    """All families, with what each has for itself. Raises `EngineError`: too small a budget."""
    homes = [(model, number) for model in models for number in range(len(model.groups))]
    families = [model.groups[number] for model, number in homes]
    staging = split_staging(families, budget) if budget else (0,) * len(families)
    return tuple(
        LayerGroupSpec(
            model, number, _own(starts[model.name], model, number, place, len(homes)), buffers
        )
        for place, ((model, number), buffers) in enumerate(zip(homes, staging, strict=True))
    )


def _own(start: ModelStart, model: ExpertModel, number: int, place: int, places: int) -> ModelStart:
    """A start for one family: its layers, a label that no other has, a phase that few have."""
    config, rows = start.config, list(model.groups[number].layers)
    sums = config.step_interval // config.sub_window
    later = place * sums // places * config.sub_window
    label = f"{config.name}[{model.name}:{number}]"  # brackets: "m.1" is also an incarnation's
    phase = (config.step_offset + later) % config.step_interval
    placement, shares = (
        np.ascontiguousarray(array[rows]) for array in (start.layout.placement, start.layout.shares)
    )
    return ModelStart(Layout(placement, shares), replace(config, name=label, step_offset=phase))


def _open(
    accelerator: Accelerator,
    fabric: Fabric,
    part: LayerGroupSpec,
    way: UpdatePath,
    journals: EventSinks,
) -> LayerGroupBalancer:
    model, start = part.model, part.start
    family = model.groups[part.number]
    store = accelerator.slot_store(family.layout(part.staging))
    berth = LayerGroupContext(accelerator, model, part.number, store)
    with berth.error_context():
        path = _path(way(berth), berth)
        shape = replace(model.shape(fabric.control.size), layers=len(family.layers))
        ends, told = (accelerator, fabric, store, shape), journals(berth)
        inner = open_balancer(*ends, start.layout, start.config, path, journal=told)
    return LayerGroupBalancer(berth, inner)


def _path(path: UpdatePathConfig, berth: LayerGroupContext) -> UpdatePathConfig:
    """With what was registered of entries, and not without what it needs."""
    if isinstance(path, InPlaceFromHost):
        return replace(path, entries=berth.entries)
    if isinstance(path, StagedFromPeers) and not berth.store.layout.staging:
        raise EngineError("weights that come by the boundary need a budget of staging")
    return path


def _balancer(model: ExpertModel, opened: Sequence[LayerGroupBalancer]) -> ModelBalancer:
    return ModelBalancer(model, tuple(one for one in opened if one.berth.model is model))


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
    """See that all ranks mean the same before anything is opened. Raises `AgreementLost`."""
    config = parts[0].start.config
    mine = {f"model {part.model.name!r}, family {part.number}": _values(part) for part in parts}
    check_same_on_all_ranks(control, f"{config.name}/open", config.timeout, mine)


def _values(part: LayerGroupSpec) -> Values:
    """What has to be the same on all ranks."""
    return {
        "registration": f"{part.model.group_line(part.number)} ({part.model.digest})",
        "layout": part.start.layout.digest,
        **config_values(part.start.config),
        "staging": str(part.staging),
    }
