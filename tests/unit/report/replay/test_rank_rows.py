"""Rows of ranks: drawn, levelled, solved, and as a rule sends them."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import ExpertShape, Layout, Placement
from equipoise.balancer.experts.planning.planner import plan
from equipoise.balancer.experts.routing.rank_rows import levelled_rank_rows
from equipoise.report.replay.engine_model import Ids, Parts, SplitKind
from equipoise.report.replay.rank_rows import (
    DrawnRows,
    LevelledRows,
    RankRowsRule,
    RoutedRows,
    SolvedRows,
    dealt,
    share_parts,
)
from equipoise.report.replay.steps import StepBlock, StepTokens

SHAPE = ExpertShape(layers=3, experts=12, slots=16, ranks=4)


def layout(seed: int, shape: ExpertShape = SHAPE) -> Layout:
    load = np.random.default_rng(seed).integers(1, 100, (shape.layers, shape.experts))
    planned = plan(load, slots=shape.slots, ranks=shape.ranks, policy="connected")
    return Layout(planned.placement, planned.shares)


def block(seed: int, steps: int, mean: int = 40, shape: ExpertShape = SHAPE) -> StepBlock:
    chances = np.random.default_rng(seed)
    size = steps, shape.layers, shape.experts
    return StepBlock(5, chances.poisson(mean, size).astype(np.int32))


def rules(seed: int) -> list[RankRowsRule]:
    installed = layout(seed)
    return [
        DrawnRows(installed, SHAPE, share_parts(installed), 0),
        SolvedRows(installed, SHAPE, 0),
        *(LevelledRows(installed, SHAPE, groups) for groups in (None, 1, 2)),
    ]


@given(st.integers(0, 99), st.integers(1, 4))
def test_rules_give_every_row_to_a_rank(seed: int, steps: int) -> None:
    played = block(seed, steps)
    for rule in rules(seed):
        rows = rule.rank_rows(played, np.arange(steps))
        assert rows.shape == (steps, SHAPE.layers, SHAPE.ranks)
        assert (rows.sum(axis=2) == played.counts.sum(axis=2)).all()
        assert rows.min() >= 0


@given(st.integers(0, 99))
def test_rows_of_a_step_do_not_depend_on_its_block(seed: int) -> None:
    played = block(seed, 4)
    alone = StepBlock(played.first + 2, played.counts[2:3])
    for rule in rules(seed):
        together = rule.rank_rows(played, np.arange(4))[2]
        assert (rule.rank_rows(alone, np.array([0]))[0] == together).all()
        assert (rule.rank_rows(played, np.array([2]))[0] == together).all()


def test_drawn_rows_have_the_odds_of_shares() -> None:
    installed = layout(3)
    rule = DrawnRows(installed, SHAPE, share_parts(installed), 0)
    played = block(1, 200, mean=500)
    rows = rule.rank_rows(played, np.arange(200)).sum(axis=0)
    of_slots = np.take_along_axis(
        played.counts.sum(axis=0, dtype=np.int64), installed.placement.astype(np.int64), axis=1
    )
    expected = (
        (of_slots * share_parts(installed)).reshape(SHAPE.layers, SHAPE.ranks, -1).sum(axis=2)
    )
    # Of 300,000 rows of a rank some 100,000 are drawn: six deviations are below 1,000.
    assert np.abs(rows - expected).max() < 1000


def test_levelled_rows_are_those_of_the_batches_of_ranks() -> None:
    installed, played = layout(2), block(2, 1)
    counts = dealt(played.counts[0], SHAPE.ranks, played.first)
    assert (counts.sum(axis=0) == played.counts[0]).all()
    rows = LevelledRows(installed, SHAPE, None).rank_rows(played, np.array([0]))[0]
    assert (rows == levelled_rank_rows(counts, installed, SHAPE)).all()


def test_levelled_rows_follow_the_ranks_of_tokens() -> None:
    installed = layout(4)
    chances = np.random.default_rng(0)
    ids = np.argsort(chances.random((40, SHAPE.layers, SHAPE.experts)), axis=2)[:, :, :3]
    tokens = StepTokens(ids.astype(np.int32), np.repeat(np.arange(4, dtype=np.int32), 10))
    counts = tokens.counts(SHAPE.experts, SHAPE.ranks)
    played = StepBlock(0, counts.sum(axis=0, dtype=np.int32)[None], (tokens,))
    rows = LevelledRows(installed, SHAPE, 2).rank_rows(played, np.array([0]))[0]
    assert (rows == levelled_rank_rows(counts, installed, SHAPE, 2)).all()


def test_levelled_rows_are_more_level_than_drawn_ones() -> None:
    played = block(7, 20)
    drawn, _, alone, together, _ = (
        rule.rank_rows(played, np.arange(20)).max(axis=2).mean() for rule in rules(7)
    )
    assert together < alone < drawn


@dataclass
class FirstReplica:
    """Sends all rows of an expert to its first replica."""

    name: str = "first"
    split: SplitKind = SplitKind.BY_SOURCE

    def parts(self, placement: Placement, shape: ExpertShape) -> Parts:
        first = [np.unique(row, return_index=True)[1] for row in placement]
        found = np.zeros(placement.shape, np.float32)
        for row, slots in zip(found, first, strict=True):
            row[slots] = 1
        return found

    def route(
        self,
        ids: Ids,
        sources: Ids,
        placement: Placement,
        shape: ExpertShape,
        layer: int,
        step: int,
    ) -> Ids:
        first = np.unique(placement[layer], return_index=True)[1]
        return np.where(ids < 0, -1, first[np.maximum(ids, 0)]).astype(np.int32)


@pytest.mark.parametrize("padded", [False, True])
def test_routed_rows_are_where_the_rule_sends_tokens(padded: bool) -> None:
    installed = layout(1)
    ids = np.tile(np.arange(12, dtype=np.int32)[:, None, None], (1, SHAPE.layers, 1))
    if padded:
        ids = np.concatenate([ids, np.full((5, SHAPE.layers, 1), -1, np.int32)])
    tokens = StepTokens(ids, np.zeros(len(ids), np.int32))
    counts = tokens.counts(SHAPE.experts, SHAPE.ranks).sum(axis=0, dtype=np.int32)
    rule = RoutedRows(FirstReplica(), installed, SHAPE)
    rows = rule.rank_rows(StepBlock(0, counts[None], (tokens,)), np.array([0]))[0]
    parts = rule.slot_parts().reshape(SHAPE.layers, SHAPE.ranks, -1).sum(axis=2)
    assert (rows == parts).all()
