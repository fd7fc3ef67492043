import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.experts.moves import itinerary
from equipoise.balancer.experts.placement import SHARE_ONE, Load, Shape, check, contiguous
from equipoise.balancer.experts.planner import (
    Layout,
    even_shares,
    imbalance,
    propose,
    solve_shares,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Load]:
    ranks = draw(st.integers(1, 5))
    per_rank = draw(st.integers(1, 5))
    slots = ranks * per_rank
    shape = Shape(draw(st.integers(1, 3)), draw(st.integers(1, slots)), slots, ranks)
    counts = st.lists(st.integers(0, 5000), min_size=shape.experts, max_size=shape.experts)
    load = [draw(counts) for _ in range(shape.layers)]
    return shape, np.array(load, dtype=np.int64)


def start(shape: Shape) -> Layout:
    placement = contiguous(shape)
    return Layout(placement, even_shares(placement, shape.experts))


@given(cases())
def test_shares_of_an_expert_make_a_whole(case: tuple[Shape, Load]) -> None:
    shape, load = case
    placement = contiguous(shape)
    for shares in (even_shares(placement, shape.experts), solve_shares(load, placement, shape)):
        for row, held in zip(shares, placement, strict=True):
            sums = np.bincount(held, weights=row, minlength=shape.experts)
            assert (sums == SHARE_ONE).all()


@given(cases())
def test_a_proposal_is_complete_and_never_worse_than_what_is_installed(
    case: tuple[Shape, Load],
) -> None:
    shape, load = case
    installed = start(shape)
    proposal = propose(load, installed, shape, hysteresis=0, staging=10_000)
    check(proposal.layout.placement, shape)
    assert (proposal.predicted <= imbalance(load, installed, shape)).all()


@given(cases())
def test_the_same_load_gives_the_same_digest(case: tuple[Shape, Load]) -> None:
    shape, load = case
    first = propose(load, start(shape), shape, hysteresis=10, staging=10_000)
    second = propose(load.copy(), start(shape), shape, hysteresis=10, staging=10_000)
    assert first.layout.digest == second.layout.digest
    assert first.moves == second.moves


@given(cases())
def test_nothing_moves_when_nothing_is_to_be_gained(case: tuple[Shape, Load]) -> None:
    shape, load = case
    first = propose(load, start(shape), shape, hysteresis=0, staging=10_000)
    again = propose(load, first.layout, shape, hysteresis=0, staging=10_000)
    assert again.changed == ()
    assert again.moves.travelling == again.moves.local == ()


@given(cases(), st.integers(0, 12))
def test_no_rank_is_asked_for_more_staging_than_it_has(
    case: tuple[Shape, Load], staging: int
) -> None:
    shape, load = case
    moves = propose(load, start(shape), shape, hysteresis=0, staging=staging).moves
    assert max(moves.arriving(rank) for rank in range(shape.ranks)) <= staging


def test_layers_that_gain_most_get_the_staging_there_is() -> None:
    shape = Shape(2, 4, 4, 2)
    load = np.array([[10, 10, 9, 11], [30, 30, 1, 1]], dtype=np.int64)
    proposal = propose(load, start(shape), shape, hysteresis=0, staging=1)
    assert proposal.changed == (1,)


def test_hysteresis_keeps_a_layer_that_gains_too_little() -> None:
    shape = Shape(1, 4, 4, 2)
    load = np.array([[11, 11, 10, 10]], dtype=np.int64)
    gain = imbalance(load, start(shape), shape)[0]
    assert propose(load, start(shape), shape, hysteresis=0, staging=9).changed == (0,)
    assert propose(load, start(shape), shape, hysteresis=int(gain), staging=9).changed == ()


def test_imbalance_is_max_over_mean_minus_one() -> None:
    shape = Shape(1, 4, 4, 2)
    load = np.array([[30, 30, 20, 20]], dtype=np.int64)
    assert imbalance(load, start(shape), shape)[0] / SHARE_ONE == pytest.approx(0.2, abs=1e-4)


def test_no_load_at_all_is_balanced() -> None:
    shape = Shape(1, 4, 4, 2)
    assert imbalance(np.zeros((1, 4), dtype=np.int64), start(shape), shape).tolist() == [0]


@given(cases())
@settings(max_examples=200)
def test_every_move_reads_a_slot_that_holds_its_expert(case: tuple[Shape, Load]) -> None:
    shape, load = case
    installed = start(shape)
    proposed = propose(load, installed, shape, hysteresis=0, staging=10_000).layout.placement
    moves = itinerary(installed.placement, proposed, shape)
    for move in (*moves.travelling, *moves.local):
        assert installed.placement[move.layer, move.source] == move.expert
        assert proposed[move.layer, move.slot] == move.expert
    touched = {(move.layer, move.slot) for move in (*moves.travelling, *moves.local)}
    assert touched == set(map(tuple, np.argwhere(installed.placement != proposed).tolist()))


@given(cases())
def test_only_copies_that_the_rank_lacked_travel(case: tuple[Shape, Load]) -> None:
    shape, load = case
    installed = start(shape)
    moves = propose(load, installed, shape, hysteresis=0, staging=10_000).moves
    for move in moves.travelling:
        source, destination = moves.ends(move)
        mine = slice(destination * shape.slots_per_rank, (destination + 1) * shape.slots_per_rank)
        assert move.expert not in installed.placement[move.layer, mine]
        assert source != destination
    for move in moves.local:
        assert moves.ends(move)[0] == moves.ends(move)[1]


def test_copies_of_one_expert_are_read_from_different_holders() -> None:
    shape = Shape(1, 4, 8, 4)
    installed = np.array([[0, 1, 0, 2, 1, 3, 2, 3]], dtype=np.int32)
    proposed = np.array([[0, 1, 0, 2, 1, 0, 2, 0]], dtype=np.int32)
    proposed[0, 1] = 3
    moves = itinerary(installed, proposed, shape)
    sources = [moves.ends(m)[0] for m in moves.travelling if m.expert == 0]
    assert sorted(sources) == [0, 1]
