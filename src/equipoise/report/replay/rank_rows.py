"""Rows that each rank gets of a step, by the rule that divides them among replicas.

From the tokens, where the trace has them, by the rule itself. From counts alone, what a rule makes
of positions is drawn anew, with the rule's odds: the expectation would miss the imbalance that the
draw makes, which is most of it in a small batch. What is levelled follows from counts to the row.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    BatchCounts,
    ExpertShape,
    Layout,
    Placement,
    even_shares,
    logical_maps,
)
from equipoise.balancer.experts.routing.rank_rows import even_rank_rows, levelled_rank_rows
from equipoise.report.replay.engine_model import DispatchRule, Parts, SplitKind
from equipoise.report.replay.steps import StepBlock, StepTokens

StepRows = npt.NDArray[np.float32]
"""(steps, layers, ranks): rows; whole numbers."""
Places = npt.NDArray[np.int64]
"""(evaluated,): places in the block of the steps that the rows are of."""


class RankRowsRule(Protocol):
    """How the rows of a step come to the ranks, under one layout."""

    def rank_rows(self, block: StepBlock, places: Places) -> StepRows:
        """Of these steps of the block."""
        ...

    def slot_parts(self) -> Parts:
        """Part of its expert's rows that each slot gets, roughly, (layers, slots)."""
        ...


@dataclass(frozen=True, eq=False)
class DrawnRows:
    """Each row draws its replica: by shares, by chance, or by where it comes from.

    Attributes:
        layout: what is installed.
        shape: numbers of layers, experts, slots and ranks.
        parts: the odds, (layers, slots).
        seed: with the step's number that of the draw.
    """

    layout: Layout
    shape: ExpertShape
    parts: Parts
    seed: int

    def slot_parts(self) -> Parts:
        """The odds."""
        return self.parts

    @cached_property
    def _single(self) -> npt.NDArray[np.float32]:
        """(layers, experts, ranks): 1 where an expert's only replica is."""
        maps = logical_maps(self.layout.placement, self.shape.experts)
        ranks = np.zeros((self.shape.layers, self.shape.experts, self.shape.ranks), np.float32)
        layers, experts = np.nonzero(maps.replica_count == 1)
        slots = maps.logical_to_physical[layers, experts, 0]
        ranks[layers, experts, slots // self.shape.slots_per_rank] = 1
        return ranks

    @cached_property
    def _plural(self) -> "_Plural":
        return _plural(self.layout, self.shape, self.parts)

    def rank_rows(self, block: StepBlock, places: Places) -> StepRows:
        """Of these steps of the block."""
        single: StepRows = np.matmul(block.by_layer(places), self._single).transpose(1, 0, 2)
        plural = self._plural
        if not plural.experts.size:
            return single
        drawn = np.empty((len(places), *plural.odds.shape), np.float32)
        for place, step in enumerate(places):
            chances = np.random.default_rng((self.seed, block.first + int(step)))
            of_plural = np.take_along_axis(block.counts[step], plural.experts, axis=1)
            of_plural = np.where(plural.present, of_plural, 0)
            drawn[place] = chances.multinomial(of_plural, plural.odds)
        layers = self.shape.layers
        by_layer = drawn.reshape(len(places), layers, -1).transpose(1, 0, 2)
        rows: StepRows = single + np.matmul(by_layer, plural.homes).transpose(1, 0, 2)
        return rows


@dataclass(frozen=True, eq=False)
class _Plural:
    """Experts with several replicas, padded to as many in each layer.

    Attributes:
        experts: int64 (layers, n).
        present: bool (layers, n), False for padding.
        odds: float64 (layers, n, replicas), padded with 0.
        homes: float32 (layers, n * replicas, ranks), 1 on the rank of each.
    """

    experts: npt.NDArray[np.int64]
    present: npt.NDArray[np.bool_]
    odds: npt.NDArray[np.float64]
    homes: npt.NDArray[np.float32]


def _plural(layout: Layout, shape: ExpertShape, parts: Parts) -> _Plural:
    maps = logical_maps(layout.placement, shape.experts)
    is_plural = maps.replica_count > 1
    width = int(is_plural.sum(axis=1).max())
    experts = np.argsort(~is_plural, axis=1, kind="stable")[:, :width].astype(np.int64)
    present = np.take_along_axis(is_plural, experts, axis=1)
    slots = np.take_along_axis(maps.logical_to_physical, experts[:, :, None], axis=1)
    is_slot = (slots >= 0) & present[:, :, None]
    at = np.maximum(slots, 0).astype(np.int64)
    odds = np.where(is_slot, parts[np.arange(shape.layers)[:, None, None], at], 0.0)
    odds = odds.astype(np.float64)
    odds[~present, 0] = 1.0
    odds /= odds.sum(axis=2, keepdims=True)
    homes = np.zeros((shape.layers, at.shape[1] * at.shape[2], shape.ranks), np.float32)
    layer, place = np.nonzero(is_slot.reshape(shape.layers, -1))
    homes[layer, place, at.reshape(shape.layers, -1)[layer, place] // shape.slots_per_rank] = 1
    return _Plural(experts, present, odds, homes)


def even_parts(placement: Placement, shape: ExpertShape) -> Parts:
    """Every replica of an expert takes as much."""
    return share_parts(Layout(placement, even_shares(placement, shape.experts)))


def share_parts(layout: Layout) -> Parts:
    """The parts that the shares of a layout are."""
    return (layout.shares / SHARE_ONE).astype(np.float32)


@dataclass(frozen=True, eq=False)
class LevelledRows:
    """Ranks level their batches: each its own, or those of a group as one.

    Attributes:
        layout: what is installed; shares are not read.
        shape: numbers of layers, experts, slots and ranks.
        groups: number of groups of neighbouring ranks; None if each rank levels alone. Where the
            trace does not say who sends which row, that is drawn, by the step's number.
    """

    layout: Layout
    shape: ExpertShape
    groups: int | None

    def slot_parts(self) -> Parts:
        """Even ones: levelled quotas follow each batch."""
        return even_parts(self.layout.placement, self.shape)

    def rank_rows(self, block: StepBlock, places: Places) -> StepRows:
        """Of these steps of the block."""
        rows = np.zeros((len(places), self.shape.layers, self.shape.ranks), np.float32)
        for place, step in enumerate(places):
            batches, groups = self._batches(block, int(step)), self.groups
            rows[place] = levelled_rank_rows(batches, self.layout, self.shape, groups)
        return rows

    def _batches(self, block: StepBlock, step: int) -> BatchCounts:
        """(ranks, layers, experts); all in one where one group levels them."""
        ranks = self.shape.ranks
        if self.groups == 1:
            return block.counts[step : step + 1]
        if block.tokens:
            return block.tokens[step].counts(self.shape.experts, ranks)
        return dealt(block.counts[step], ranks, block.first + step)


def dealt(counts: npt.NDArray[np.int32], ranks: int, seed: int) -> BatchCounts:
    """Deals rows (layers, experts) to ranks at random, int32 (ranks, layers, experts)."""
    rows = np.empty((counts.shape[0], ranks, counts.shape[1]), np.int32)
    _native.deal_rows(np.ascontiguousarray(counts), ranks, seed, rows)
    return rows.transpose(1, 0, 2)


@dataclass(frozen=True, eq=False)
class TurnRows:
    """Replicas take turns: even, to the row."""

    layout: Layout
    shape: ExpertShape

    def slot_parts(self) -> Parts:
        """Even ones."""
        return even_parts(self.layout.placement, self.shape)

    def rank_rows(self, block: StepBlock, places: Places) -> StepRows:
        """Of these steps of the block."""
        rows = [
            even_rank_rows(block.counts[step : step + 1], self.layout, self.shape)
            for step in places.tolist()
        ]
        return np.array(rows, np.float32)


@dataclass(frozen=True, eq=False)
class SolvedRows:
    """Shares are solved for each step's counts, over all ranks, and rows draw by them."""

    layout: Layout
    shape: ExpertShape
    seed: int

    def slot_parts(self) -> Parts:
        """Those of the layout."""
        return share_parts(self.layout)

    def rank_rows(self, block: StepBlock, places: Places) -> StepRows:
        """Of these steps of the block."""
        rows = np.empty((len(places), self.shape.layers, self.shape.ranks), np.float32)
        placement = np.ascontiguousarray(self.layout.placement)
        for place, step in enumerate(places):
            counts = block.counts[step].astype(np.int64)
            shares = _native.solve_shares(counts, placement, self.shape.ranks)
            layout = replace(self.layout, shares=shares)
            drawn = DrawnRows(layout, self.shape, share_parts(layout), self.seed)
            rows[place] = drawn.rank_rows(block, np.array([step]))[0]
        return rows


@dataclass(frozen=True, eq=False)
class RoutedRows:
    """Tokens are sent as the engine's own rule sends them."""

    rule: DispatchRule
    layout: Layout
    shape: ExpertShape

    def slot_parts(self) -> Parts:
        """As the rule has them; even where it solves them for each batch."""
        if self.rule.split is SplitKind.BY_BATCH:
            return even_parts(self.layout.placement, self.shape)
        return self.rule.parts(self.layout.placement, self.shape)

    def rank_rows(self, block: StepBlock, places: Places) -> StepRows:
        """Of these steps of the block."""
        rows = np.zeros((len(places), self.shape.layers, self.shape.ranks), np.float32)
        for place, step in enumerate(places):
            tokens = block.tokens[step]
            for layer in range(self.shape.layers):
                rows[place, layer] = self._layer(tokens, layer, block.first + int(step))
        return rows

    def _layer(self, tokens: StepTokens, layer: int, step: int) -> npt.NDArray[np.int64]:
        ids = np.ascontiguousarray(tokens.ids[:, layer])
        slots = self.rule.route(ids, tokens.sources, self.layout.placement, self.shape, layer, step)
        ranks = slots[slots >= 0] // self.shape.slots_per_rank
        rows: npt.NDArray[np.int64] = np.bincount(ranks, minlength=self.shape.ranks)
        return rows
