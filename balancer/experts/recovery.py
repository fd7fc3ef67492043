"""What is left when ranks are gone, and how it is made whole again."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balancer.experts.agreement.key_collector import BEFORE, Filed
from equipoise.balancer.experts.agreement.members import Members
from equipoise.balancer.experts.builder import AtBoundary, Means
from equipoise.balancer.experts.config import EngineConfig
from equipoise.balancer.experts.placement import Layout, Placement, Shape, even_shares
from equipoise.balancer.experts.runtime.jobs import finish
from equipoise.balancer.experts.transfer.host_writes import Supply, write_checked
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import AgreementLost, ExpertsLost


@dataclass(frozen=True)
class Refill:
    """A slot (over all that are left) that gets an expert whose last copy was lost."""

    layer: int
    slot: int
    expert: int


@dataclass(frozen=True)
class Salvage:
    """What can be served by those who are left.

    Attributes:
        shape: of the smaller group.
        layout: with even shares, until a load has been seen.
        refills: slots that have to be written first.
    """

    shape: Shape
    layout: Layout
    refills: tuple[Refill, ...]


def salvage(layout: Layout, shape: Shape, before: Members, after: Members) -> Salvage:
    """The same on every rank that is left. Raises `PlacementError`: too few slots are left."""
    per = shape.slots_per_rank
    places = [before.ranks.index(rank) for rank in after.ranks]
    smaller = Shape(shape.layers, shape.experts, per * len(places), len(places))
    kept = layout.placement.reshape(shape.layers, shape.ranks, per)[:, places]
    placement = np.ascontiguousarray(kept.reshape(shape.layers, smaller.slots))
    refills = tuple(
        Refill(layer, slot, expert)
        for layer in range(shape.layers)
        for slot, expert in _refilled(placement[layer], shape.experts)
    )
    return Salvage(smaller, Layout(placement, even_shares(placement, shape.experts)), refills)


def _refilled(row: Placement, experts: int) -> list[tuple[int, int]]:
    """Give every expert that has no slot one of the expert that has most. Changes `row`."""
    copies = np.bincount(row, minlength=experts)
    found = []
    for expert in np.flatnonzero(copies == 0).tolist():
        fullest = int(copies.argmax())
        slot = int(np.flatnonzero(row == fullest)[-1])
        copies[fullest] -= 1
        copies[expert] += 1
        row[slot] = expert
        found.append((slot, expert))
    return found


def agree(
    control: ControlPlane, members: Members, config: EngineConfig, layout: Layout, step: int
) -> Filed:
    """See that all who are left mean the same; returns what was asked to that end.

    Raises:
        AgreementLost: they do not.
        BallotIncomplete: one of them does not come.
    """
    question = f"{members.named(config.label)}/reconfigure"
    mine = {"ranks": members.ranks, "layout": layout.digest, "step": step}
    control.cast(question, json.dumps(mine, sort_keys=True).encode())
    ballots = control.collect(question, config.deadline, members.ranks)
    for rank, ballot in zip(members.ranks, ballots, strict=True):
        theirs = json.loads(ballot)
        for key in sorted(mine):
            if json.dumps(theirs.get(key)) != json.dumps(mine[key]):
                raise AgreementLost(
                    f"reconfigure: rank {rank} has {key} {theirs.get(key)}, "
                    f"rank {members.own} has {mine[key]}"
                )
    return Filed(BEFORE, question, members.ranks)


def refill(means: Means, saved: Salvage) -> None:
    """Write this rank's part of what was lost from the host's memory.

    Raises:
        ExpertsLost: it has none.
        SlotError: what was written is not what was read.
    """
    if not saved.refills:
        return
    supplies = means.path.spare if isinstance(means.path, AtBoundary) else (means.path.supply,)
    if not supplies:
        gone: dict[int, list[int]] = {}
        for lost in saved.refills:
            gone.setdefault(lost.layer, []).append(lost.expert)
        raise ExpertsLost(gone)
    _write(means, supplies[0], saved)


def rewrite(means: Means, saved: Salvage, layers: Sequence[int]) -> None:
    """Write all of this rank's slots of layers that were left half written. Raises `SlotError`."""
    if isinstance(means.path, AtBoundary):
        return
    per, place = saved.shape.slots_per_rank, means.members.place
    for layer in layers:
        experts = saved.layout.placement[layer, place * per : (place + 1) * per].tolist()
        _fill(means, means.path.supply, layer, range(layer * per, (layer + 1) * per), experts)


def _write(means: Means, supply: Supply, saved: Salvage) -> None:
    per, place = saved.shape.slots_per_rank, means.members.place
    for layer in range(saved.shape.layers):
        mine = [r for r in saved.refills if r.layer == layer and r.slot // per == place]
        slots = [layer * per + refilled.slot % per for refilled in mine]
        _fill(means, supply, layer, slots, [refilled.expert for refilled in mine])


def _fill(
    means: Means, supply: Supply, layer: int, slots: Sequence[int], experts: Sequence[int]
) -> None:
    writing = write_checked(means.accelerator, means.store, supply, layer, slots, experts)
    finish(writing, means.config.deadline)
