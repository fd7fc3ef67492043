"""Tables of SGLang's dispatch: what they may not break, and that they level."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import (
    ABSENT,
    SHARE_ONE,
    ExpertShape,
    Layout,
    imbalance,
    logical_maps,
)
from equipoise.balancer.experts.planning.planner import plan
from equipoise.integrations.sglang.dispatch_tables import (
    MAX_CANDIDATES,
    DispatchTable,
    even_candidates,
    rank_dispatch,
    weighted_candidates,
)

Table = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """A load, and any placement with all experts."""

    shape: ExpertShape
    nodes: int
    load: Table
    placement: Table


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes, ranks, own = (draw(st.integers(1, most)) for most in (4, 9, 6))
    slots = ranks * own
    shape = ExpertShape(draw(st.integers(1, 3)), draw(st.integers(1, slots)), slots, ranks)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    extra = rng.integers(0, shape.experts, (shape.layers, slots - shape.experts))
    every = np.tile(np.arange(shape.experts), (shape.layers, 1))
    placement = rng.permuted(np.concatenate([every, extra], axis=1), axis=1)
    scale = draw(st.sampled_from([0, 1, 40, 10**6, 2**38]))
    load = np.minimum(scale * rng.pareto(1.0, (shape.layers, shape.experts)), 2**39 - 1)
    return Case(shape, nodes, load.astype(np.int64), placement)


def realistic(ranks: int, nodes: int) -> Case:
    """Experts whose loads differ as those of real models do, and a placement planned for them."""
    shape = ExpertShape(4, 64, 64 + 2 * ranks, ranks)
    load = (1000 * np.exp(np.random.default_rng(3).normal(0, 1.1, (4, 64)))).astype(np.int64)
    placement = plan(load, slots=shape.slots, ranks=ranks, split="even").placement
    return Case(shape, nodes, load, placement.astype(np.int64))


def level(case: Case, table: DispatchTable) -> float:
    """Imbalance by a table, mean over layers."""
    layout = Layout(case.placement.astype(np.int32), table.shares)
    return float(imbalance(case.load, layout, case.shape).mean() / SHARE_ONE)


@given(cases())
def test_weighted_candidates_hold_the_expert_that_they_stand_for(case: Case) -> None:
    table = weighted_candidates(case.load, case.placement, case.shape)
    held = np.take_along_axis(case.placement[:, None, :], np.maximum(table.slots, 0), axis=2)
    there = table.slots != ABSENT
    assert (held == np.arange(case.shape.experts)[None, :, None])[there].all()
    assert there[:, :, 0].all()
    assert not (there[:, :, 1:] & ~there[:, :, :-1]).any(), "SGLang takes the first ones"
    counts = there.sum(axis=2)
    most = np.maximum(1 << (case.shape.slots.bit_length() - 1), counts)
    assert (counts <= np.minimum(most, max(MAX_CANDIDATES, case.shape.slots))).all()


@given(cases())
def test_weighted_candidates_level_no_worse_than_an_even_split(case: Case) -> None:
    table = weighted_candidates(case.load, case.placement, case.shape)
    rows = [
        imbalance(case.load, Layout(case.placement.astype(np.int32), each.shares), case.shape)
        for each in (table, even_candidates(case.placement, case.shape))
    ]
    assert (rows[0] <= rows[1]).all()


@given(cases())
def test_weighted_candidates_are_drawn_as_often_as_their_shares_say(case: Case) -> None:
    table = weighted_candidates(case.load, case.placement, case.shape)
    for layer in range(case.shape.layers):
        for expert in range(case.shape.experts):
            listed = table.slots[layer, expert]
            listed = listed[listed != ABSENT]
            for slot in set(listed.tolist()):
                expected = SHARE_ONE * (listed == slot).sum() / len(listed)
                assert abs(table.shares[layer, slot] - expected) <= 1


@given(cases())
def test_every_rank_sends_to_a_slot_that_holds_the_expert(case: Case) -> None:
    table = rank_dispatch(case.load, case.placement, case.shape, case.nodes)
    assert table.slots.shape == (case.shape.ranks, case.shape.layers, case.shape.experts)
    held = np.take_along_axis(case.placement[None], table.slots, axis=2)
    assert (held == np.arange(case.shape.experts)).all()


@given(cases())
def test_rank_prefers_its_own_slot_and_then_those_of_its_node(case: Case) -> None:
    shape = case.shape
    table = rank_dispatch(case.load, case.placement, shape, case.nodes)
    per_node = max(shape.ranks // case.nodes, 1)
    for rank in range(shape.ranks):
        for layer in range(shape.layers):
            for expert in range(shape.experts):
                slots = np.flatnonzero(case.placement[layer] == expert)
                ranks = slots // shape.slots_per_rank
                near = slots[ranks // per_node == rank // per_node]
                own = slots[ranks == rank]
                chosen = table.slots[rank, layer, expert]
                if len(own):
                    assert chosen == own[0]
                elif 0 < len(near) < len(slots):
                    assert chosen == near[0]


@given(cases(), st.integers(0, 2**32))
def test_rank_dispatch_divides_the_last_expert_as_well_as_it_can(case: Case, seed: int) -> None:
    """No free rank of it could send elsewhere so that the fuller of both slots' ranks gets less."""
    shape, rng = case.shape, np.random.default_rng(seed)
    table = rank_dispatch(case.load, case.placement, shape, case.nodes)
    rows = np.zeros((shape.layers, shape.ranks))
    layers = np.arange(shape.layers)[None, :, None]
    np.add.at(rows, (layers, table.slots // shape.slots_per_rank), case.load[None])
    per_node = max(shape.ranks // case.nodes, 1)
    # The others were divided before it, when it was divided otherwise.
    for layer in range(shape.layers):
        counts = np.bincount(case.placement[layer], minlength=shape.experts)
        replicated = np.flatnonzero(counts > 1)
        if not len(replicated):
            continue
        last = replicated[np.lexsort((-case.load[layer][replicated],))][-1]
        slots = np.flatnonzero(case.placement[layer] == last)
        ranks = slots // shape.slots_per_rank
        free = [
            rank
            for rank in range(shape.ranks)
            if rank not in ranks
            and not 0 < (ranks // per_node == rank // per_node).sum() < len(slots)
        ]
        if not free or not case.load[layer, last]:
            continue
        rank = rng.choice(free)
        now = table.slots[rank, layer, last] // shape.slots_per_rank
        for other in ranks:
            if other != now:
                load = case.load[layer, last]
                assert rows[layer, other] + load >= rows[layer, now]


@pytest.mark.parametrize(("ranks", "nodes"), [(8, 1), (32, 4)])
def test_tables_filled_by_the_load_level_more_than_even_ones(ranks: int, nodes: int) -> None:
    case = realistic(ranks, nodes)
    static = rank_dispatch(case.load, case.placement, case.shape, nodes)
    # As SGLang's own table: it does not look at the load.
    blind = rank_dispatch(np.ones_like(case.load), case.placement, case.shape, nodes)
    assert level(case, static) < 0.8 * level(case, blind)
    dynamic = weighted_candidates(case.load, case.placement, case.shape)
    assert level(case, dynamic) <= level(case, even_candidates(case.placement, case.shape))


def test_candidates_in_a_row_are_divided_by_their_shares() -> None:
    placement = np.array([[0, 1, 0, 1, 2, 3, 0, 3]])
    load = np.array([[900, 400, 100, 600]])
    shape = ExpertShape(1, 4, 8, 4)
    table = weighted_candidates(load, placement, shape)
    for expert in range(4):
        listed = table.slots[0, expert]
        listed = listed[listed != ABSENT]
        for length in range(1, len(listed) + 1):
            for slot in logical_maps(placement, 4).logical_to_physical[0, expert]:
                if slot != ABSENT:
                    share = (listed == slot).mean()
                    assert abs((listed[:length] == slot).sum() - length * share) < 1
