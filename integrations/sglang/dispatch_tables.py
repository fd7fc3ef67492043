"""Tables of SGLang's dispatch that level ranks by the load that a placement was planned for.

SGLang sends a token of an expert with several slots to one of them by a table: `dynamic` draws one
of the candidates of the expert, `static` looks up what each rank sends to. Its own tables divide an
expert evenly, whatever its load. These have its form, and divide by the load: under `dynamic` a
candidate is listed several times, under `static` more ranks send to one slot than to another.

In integers: every rank computes them for itself, and all have to get the same.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.balancer.compat.input_arrays import Counts
from equipoise.balancer.experts.placement import (
    ABSENT,
    SHARE_ONE,
    ExpertShape,
    Ids,
    Layout,
    Shares,
    even_shares,
    imbalance,
    logical_maps,
    solve_shares,
)

MAX_CANDIDATES = 256
"""Of an expert, repeats included: shares in parts of that are as good as exact ones."""
SWEEPS = 6
"""Rounds over the experts of a layer, each of which is divided again in each; further ones change
little."""
UNREACHABLE = np.iinfo(np.int64).max


@dataclass(frozen=True)
class DispatchTable:
    """What SGLang looks up, and what comes of it.

    Attributes:
        slots: int64; for `dynamic` (layers, experts, candidates), absent ones at the end; for
            `static` (ranks, layers, experts), the slot that a rank sends to.
        shares: int32 (layers, slots), the part of its expert's tokens that a slot gets, in 1 /
            65536; for `static`, if ranks have equal numbers of tokens.
    """

    slots: Ids
    shares: Shares


@dataclass(frozen=True)
class _Replicated:
    """The experts with more than one slot: m of them, with up to x slots.

    Attributes:
        layers, experts: int64 (m,), their numbers.
        slots: int64 (m, x), padded with `ABSENT`.
        load: int64 (m,), tokens.
    """

    layers: Ids
    experts: Ids
    slots: Ids
    load: Counts


def even_candidates(placement: Ids, shape: ExpertShape) -> DispatchTable:
    """Return SGLang's own table: every slot of an expert once."""
    shares = even_shares(placement.astype(np.int32), shape.experts)
    return DispatchTable(logical_maps(placement, shape.experts).logical_to_physical, shares)


def weighted_candidates(load: Counts, placement: Ids, shape: ExpertShape) -> DispatchTable:
    """Return the table for `dynamic`: candidates in proportion to the shares that level ranks.

    A layer that the even split levels as well keeps that: few slots allow few repeats.

    Args:
        load: int64 (layers, experts), tokens, below 2**39 for an expert.
        placement: int64 (layers, slots), the expert in each slot.
        shape: numbers of layers, experts, slots and ranks.
    """
    even = even_candidates(placement, shape)
    # A power of two: SGLang draws one of 65,536 numbers and takes the remainder.
    candidates = min(MAX_CANDIDATES, 1 << (shape.slots.bit_length() - 1))
    each = _replicated(even.slots, load)
    installed = placement.astype(np.int32)
    there = each.slots != ABSENT
    shares = solve_shares(load, installed, shape)[each.layers[:, None], each.slots]
    turns = _interleave(np.where(there, shares, 0).astype(np.int64), candidates)
    realised = even.shares.copy()
    at = each.layers[:, None].repeat(each.slots.shape[1], axis=1)[there], each.slots[there]
    realised[at] = (_counts(turns, each.slots.shape[1]) * SHARE_ONE // candidates)[there]
    levels = imbalance(load, Layout(installed, realised), shape) < imbalance(
        load, Layout(installed, even.shares), shape
    )
    slots = np.full((shape.layers, shape.experts, shape.slots), ABSENT, np.int64)
    slots[:, :, : even.slots.shape[2]] = even.slots
    used = levels[each.layers]
    sequence = np.take_along_axis(each.slots, turns, axis=1)
    slots[each.layers[used], each.experts[used]] = ABSENT
    slots[each.layers[used], each.experts[used], :candidates] = sequence[used]
    return DispatchTable(slots, np.where(levels[:, None], realised, even.shares))


def rank_dispatch(load: Counts, placement: Ids, shape: ExpertShape, nodes: int) -> DispatchTable:
    """Return the table for `static`: which slot of an expert each rank sends to.

    A rank sends to its own slot of an expert, or else to the first one of its node if there are
    slots on other nodes too, as in SGLang's own table. The ranks that neither holds for are divided
    such that the fullest rank gets the least.

    Args:
        load: int64 (layers, experts), tokens, below 2**39 for an expert; as many on every rank.
        placement: int64 (layers, slots), the expert in each slot.
        shape: numbers of layers, experts, slots and ranks.
        nodes: number of nodes; each has as many ranks, and SGLang rounds down.
    """
    candidates = logical_maps(placement, shape.experts).logical_to_physical
    each = _replicated(candidates, load)
    column = _preferred_column(each.slots, shape, nodes)
    units = _level(each, column, _single_rows(load, candidates, shape), shape)
    # The first of the free ranks send to the first slot: those of a node to few slots.
    column[column == ABSENT] = np.repeat(np.indices(units.shape)[1].ravel(), units.ravel())
    chosen = np.take_along_axis(each.slots, column, axis=1)
    slots = np.tile(candidates[:, :, 0], (shape.ranks, 1, 1))
    slots[:, each.layers, each.experts] = chosen.T
    senders = np.zeros((shape.layers, shape.slots), np.int64)
    np.add.at(senders, (np.arange(shape.layers)[None, :, None], slots), 1)
    return DispatchTable(slots, (senders * SHARE_ONE // shape.ranks).astype(np.int32))


def _replicated(candidates: Ids, load: Counts) -> _Replicated:
    """Return the experts that have more than one of `candidates` (layers, experts, x)."""
    if candidates.shape[2] == 1:
        candidates = np.pad(candidates, ((0, 0), (0, 0), (0, 1)), constant_values=ABSENT)
    layers, experts = np.nonzero(candidates[:, :, 1] != ABSENT)
    return _Replicated(layers, experts, candidates[layers, experts], load[layers, experts])


def _interleave(weights: Counts, length: int) -> Ids:
    """Return int64 (m, length), columns of `weights` (m, x) by turns, each by its weight.

    Weights of a row have the sum 65536. Also a few turns in a row are divided by weight: where
    SGLang's ranks have to agree, it takes the candidates in order. Source of the algorithm: the
    smooth weighted round robin of nginx.
    """
    credit = np.zeros_like(weights)
    turns = np.zeros((len(weights), length), np.int64)
    rows = np.arange(len(weights))
    for turn in range(length):
        credit += weights
        turns[:, turn] = credit.argmax(axis=1)
        credit[rows, turns[:, turn]] -= SHARE_ONE
    return turns


def _counts(columns: Ids, width: int) -> Counts:
    """Return int64 (m, width): how often each column stands in a row of `columns` (m, n), -1
    nowhere."""
    rows = np.arange(len(columns))[:, None]
    counted = (rows * width + columns)[columns != ABSENT]
    return np.bincount(counted, minlength=len(columns) * width).reshape(len(columns), width)


def _preferred_column(slots: Ids, shape: ExpertShape, nodes: int) -> Ids:
    """Return int64 (m, ranks): column of `slots` (m, x) that a rank prefers, `ABSENT` if none."""
    ranks_per_node = max(shape.ranks // nodes, 1)
    nodes = -(-shape.ranks // ranks_per_node)
    by_rank = np.full((len(slots), shape.ranks), ABSENT, np.int64)
    by_node = np.full((len(slots), nodes), ABSENT, np.int64)
    near = np.zeros((len(slots), nodes), np.int64)
    # From the last column to the first, which is the one that stays.
    for column in reversed(range(slots.shape[1])):
        has = np.flatnonzero(slots[:, column] != ABSENT)
        rank = slots[has, column] // shape.slots_per_rank
        by_rank[has, rank] = column
        by_node[has, rank // ranks_per_node] = column
        near[has, rank // ranks_per_node] += 1
    narrows = near < (slots != ABSENT).sum(axis=1, keepdims=True)
    of_node = np.where(narrows, by_node, ABSENT).repeat(ranks_per_node, axis=1)
    return np.where(by_rank == ABSENT, of_node[:, : shape.ranks], by_rank)


def _single_rows(load: Counts, candidates: Ids, shape: ExpertShape) -> Counts:
    """Return int64 (layers, ranks), rows of the experts with one slot, times ranks."""
    rows = np.zeros((shape.layers, shape.ranks), np.int64)
    alone = (candidates != ABSENT).sum(axis=2) == 1
    layers, experts = np.nonzero(alone)
    ranks = candidates[layers, experts, 0] // shape.slots_per_rank
    np.add.at(rows, (layers, ranks), load[layers, experts] * shape.ranks)
    return rows


def _level(each: _Replicated, preferred: Ids, rows: Counts, shape: ExpertShape) -> Counts:
    """Return int64 (m, x): how many of the free ranks send to each slot.

    Args:
        each: the experts.
        preferred: int64 (m, ranks), columns of their slots, `ABSENT` where a rank is free.
        rows: int64 (layers, ranks), of all other experts, times ranks.
        shape: numbers of layers, experts, slots and ranks.
    """
    rows = rows.copy()
    ranks = np.where(each.slots != ABSENT, each.slots // shape.slots_per_rank, 0)
    # A second slot of a rank would be filled as if the first one took nothing.
    there = each.slots != ABSENT
    there[:, 1:] &= ranks[:, 1:] != ranks[:, :-1]
    fixed = _counts(preferred, each.slots.shape[1])
    np.add.at(rows, (each.layers[:, None], ranks), fixed * each.load[:, None])
    free = (preferred == ABSENT).sum(axis=1)
    units = np.zeros_like(each.slots)
    turns = _one_of_each_layer(each)
    for _ in range(SWEEPS):
        for chosen in turns:
            at = each.layers[chosen][:, None], ranks[chosen]
            load = each.load[chosen][:, None]
            np.subtract.at(rows, at, units[chosen] * load)
            units[chosen] = _fill(rows[at], there[chosen], load, free[chosen])
            np.add.at(rows, at, units[chosen] * load)
    return units


def _one_of_each_layer(each: _Replicated) -> list[Ids]:
    """Return indices of experts, at most one of each layer at a time, the largest load first."""
    order = np.lexsort((-each.load, each.layers))
    layers = each.layers[order]
    place = np.arange(len(order)) - np.searchsorted(layers, layers)
    return [order[place == turn] for turn in range(place.max(initial=-1) + 1)]


def _fill(rows: Counts, there: npt.NDArray[np.bool_], load: Counts, free: Counts) -> Counts:
    """Return int64 (n, x): `free` (n,) units of `load` (n, 1), one after the other to the slot
    that has the least rows then.

    Args:
        rows: int64 (n, x), rows without them.
        there: bool (n, x), whether there is a slot.
        load: rows of a unit.
        free: numbers of units.
    """
    unit = np.maximum(load, 1)
    lowest = np.sort(np.where(there, rows, UNREACHABLE), axis=1)
    filled = np.cumsum(np.where(lowest == UNREACHABLE, 0, lowest), axis=1) + free[:, None] * unit
    # The level that the units would reach if they could be split: the least over numbers of slots.
    levels = filled // np.arange(1, rows.shape[1] + 1)
    level = np.where(lowest == UNREACHABLE, UNREACHABLE, levels).min(axis=1, keepdims=True)
    units = np.where(there, np.maximum(level - rows, 0) // unit, 0)
    # What is left of the rounding: to those that end lowest then, the first of equal ones.
    while (left := free - units.sum(axis=1)).any():
        ends = np.where(there, rows + (units + 1) * unit, UNREACHABLE)
        place = np.argsort(np.argsort(ends, axis=1, kind="stable"), axis=1)
        units = units + (there & (place < left[:, None]))
    filled_units: Counts = units
    return filled_units
