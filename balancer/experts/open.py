"""How bytes in flight are divided among families of layers.

From registered models to running balancers.

    balancers = open_model_balancers(accelerator, fabric, models, starts, budget=64 << 20)
    target = balancers["target"]
    with target.step(n):
        ...
        with target.reading(3, n):
            slots = target.router(3).route(n, ids)

Everything is opened in one order on every rank: models as the set has them, families as the model.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise.balancer.experts.balancer import open_balancer
from equipoise.balancer.experts.builder import BY_BOUNDARY, AtBoundary, CommitPath
from equipoise.balancer.experts.closing import abandon
from equipoise.balancer.experts.config import EngineConfig
from equipoise.balancer.experts.model_balancer import (
    Berth,
    FamilyBalancer,
    ModelBalancer,
    ModelBalancers,
)
from equipoise.balancer.experts.placement import Layout, check
from equipoise.balancer.experts.runtime.events import SILENT, Journal
from equipoise.balancer.experts.startup_check import alike, ask, differs
from equipoise.balancer.experts.weights.expert_weights import ExpertModel, Family
from equipoise.balancer.experts.weights.memory_spans import ModelSet
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import AgreementLost, EngineError, UsageError


def divided(families: Sequence[Family], budget: int) -> tuple[int, ...]:
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
Way = Callable[[Berth], CommitPath]
"""How weights come into the slots of a family."""
Journals = Callable[[Berth], Journal]
"""Who is told what happens to a family."""


@dataclass(frozen=True)
class Start:
    """How a model begins.

    Attributes:
        layout: what its slots hold, by row of its placement.
        config: cadence and bounds.
    """

    layout: Layout
    config: EngineConfig


@dataclass(frozen=True)
class Part:
    """A family that is to be opened.

    Attributes:
        model: whose.
        number: of the family in the model.
        start: of this family alone, with a label and a phase of its own.
        staging: buffers.
    """

    model: ExpertModel
    number: int
    start: Start
    staging: int


def open_model_balancers(
    accelerator: Accelerator,
    fabric: Fabric,
    models: ModelSet,
    starts: Mapping[str, Start],
    *,
    budget: int = 0,
    way: Way = lambda berth: BY_BOUNDARY,
    journals: Journals = lambda berth: SILENT,
) -> ModelBalancers:
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
    parts = parts_of(models, starts, budget)
    _agree(fabric.control, parts)
    opened: list[FamilyBalancer] = []
    try:
        for part in parts:
            opened.append(_open(accelerator, fabric, part, way, journals))
    except BaseException:
        abandon(opened)
        raise
    return _told(ModelBalancers({model.name: _balancer(model, opened) for model in models}), fabric)


def _told(opened: ModelBalancers, fabric: Fabric) -> ModelBalancers:
    """The same, when the first rank has said what they take."""
    if fabric.control.rank == 0:
        MEMORY.info("device memory of a rank:\n%s", opened.ledger)
    return opened


def parts_of(models: ModelSet, starts: Mapping[str, Start], budget: int) -> tuple[Part, ...]:
    """All families, with what each has for itself. Raises `EngineError`: too small a budget."""
    homes = [(model, number) for model in models for number in range(len(model.families))]
    families = [model.families[number] for model, number in homes]
    staging = divided(families, budget) if budget else (0,) * len(families)
    return tuple(
        Part(model, number, _own(starts[model.name], model, number, place, len(homes)), buffers)
        for place, ((model, number), buffers) in enumerate(zip(homes, staging, strict=True))
    )


def _own(start: Start, model: ExpertModel, number: int, place: int, places: int) -> Start:
    """A start for one family: its layers, a label that no other has, a phase that few have."""
    config, rows = start.config, list(model.families[number].layers)
    sums = config.step_interval // config.sub_window
    later = place * sums // places * config.sub_window
    label = f"{config.label}[{model.name}:{number}]"  # brackets: "m.1" is also an incarnation's
    phase = (config.phase + later) % config.step_interval
    placement, shares = (
        np.ascontiguousarray(array[rows]) for array in (start.layout.placement, start.layout.shares)
    )
    return Start(Layout(placement, shares), replace(config, label=label, phase=phase))


def _open(
    accelerator: Accelerator, fabric: Fabric, part: Part, way: Way, journals: Journals
) -> FamilyBalancer:
    model, start = part.model, part.start
    family = model.families[part.number]
    store = accelerator.slot_store(family.layout(part.staging))
    berth = Berth(accelerator, model, part.number, store)
    with berth.named():
        path = _path(way(berth), berth)
        shape = replace(model.shape(fabric.control.size), layers=len(family.layers))
        ends, told = (accelerator, fabric, store, shape), journals(berth)
        inner = open_balancer(*ends, start.layout, start.config, path, journal=told)
    return FamilyBalancer(berth, inner)


def _path(path: CommitPath, berth: Berth) -> CommitPath:
    """With what was registered of entries, and not without what it needs."""
    if not isinstance(path, AtBoundary):
        return replace(path, entries=berth.entries)
    if not berth.store.layout.staging:
        raise EngineError("weights that come by the boundary need a budget of staging")
    return path


def _balancer(model: ExpertModel, opened: Sequence[FamilyBalancer]) -> ModelBalancer:
    return ModelBalancer(model, tuple(one for one in opened if one.berth.model is model))


def _check(models: ModelSet, starts: Mapping[str, Start], ranks: int) -> None:
    """Raise `UsageError` for other models, `PlacementError` for another model's layout."""
    if set(starts) != {model.name for model in models}:
        raise UsageError(f"starts of {sorted(starts)} for {[model.name for model in models]}")
    for model in models:
        try:
            check(starts[model.name].layout.placement, model.shape(ranks))
        except EngineError as error:
            error.args = (f"model {model.name!r}: {error}",)
            raise


def _agree(control: ControlPlane, parts: tuple[Part, ...]) -> None:
    """See that all ranks mean the same before anything is opened. Raises `AgreementLost`."""
    config, mine = parts[0].start.config, [_said(part) for part in parts]
    for rank, theirs in enumerate(ask(control, f"{config.label}/open", config.deadline, mine)):
        if len(theirs) != len(mine):
            raise AgreementLost(f"rank {rank} has {len(theirs)} families, this one {len(mine)}")
        for other, own in zip(theirs, mine, strict=True):
            if (what := differs(own, other)) is not None:
                raise AgreementLost(
                    f"model {own['model']!r}: rank {rank} has {what} {other.get(what)}, rank "
                    f"{control.rank} has {own[what]}"
                )


def _said(part: Part) -> dict[str, str]:
    """What has to be alike."""
    start = part.start
    return {
        "model": part.model.name,
        "registered": f"{part.model.family_line(part.number)} ({part.model.digest})",
        "layout": start.layout.digest,
        "config": alike(start.config),
        "staging": str(part.staging),
    }
