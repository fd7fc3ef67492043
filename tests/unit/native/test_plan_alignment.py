"""Relabelling a proposed plan: what it keeps, and that it never costs a copy."""

from collections import Counter
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from equipoise import _native

UNHURRIED = settings(deadline=None)
Placements = tuple[NDArray[np.int32], NDArray[np.int32], int]


@st.composite
def placements(draw: st.DrawFn) -> Placements:
    """Installed, proposal, ranks: few experts, so that ranks have much in common."""
    layers, ranks, per_rank = (draw(st.integers(1, n)) for n in (3, 5, 4))
    slots = ranks * per_rank
    row = st.lists(st.integers(0, 6), min_size=slots, max_size=slots)
    both = [draw(st.lists(row, min_size=layers, max_size=layers)) for _ in range(2)]
    installed, proposal = (np.array(rows, dtype=np.int32) for rows in both)
    return installed, proposal, ranks


def by_rank(layer: NDArray[np.int32], ranks: int) -> list[Counter[int]]:
    return [Counter(rank.tolist()) for rank in np.split(layer, ranks)]


def slow_moves(installed: NDArray[np.int32], proposal: NDArray[np.int32], ranks: int) -> int:
    return sum(
        (after - before).total()
        for old, new in zip(installed, proposal, strict=True)
        for before, after in zip(by_rank(old, ranks), by_rank(new, ranks), strict=True)
    )


def greedy_labels(old: list[Counter[int]], new: list[Counter[int]]) -> list[int]:
    label: dict[int, int] = {}
    while len(label) < len(new):
        pairs = [
            (-(new[p] & old[q]).total(), p, q)
            for p in range(len(new))
            for q in range(len(old))
            if p not in label and q not in label.values()
        ]
        _, p, q = min(pairs)
        label[p] = q
    return [label[p] for p in range(len(new))]


def in_common(old: list[Counter[int]], new: list[Counter[int]], label: list[int]) -> int:
    return sum((new[p] & old[q]).total() for p, q in enumerate(label))


@UNHURRIED
@given(placements())
def test_align_matches_ranks_greedily_unless_worse(case: Placements) -> None:
    installed, proposal, ranks = case
    aligned = _native.align(installed, proposal, ranks)
    for before, proposal_row, after in zip(installed, proposal, aligned, strict=True):
        old, new = by_rank(before, ranks), by_rank(proposal_row, ranks)
        label, same = greedy_labels(old, new), list(range(ranks))
        labels = label if in_common(old, new, label) >= in_common(old, new, same) else same
        actual = by_rank(after, ranks)
        assert [actual[q] for q in labels] == new


@UNHURRIED
@given(placements())
def test_align_keeps_proposed_expert_groups(case: Placements) -> None:
    installed, proposal, ranks = case
    aligned = _native.align(installed, proposal, ranks)
    for proposal_row, after in zip(proposal, aligned, strict=True):
        assert sorted(map(sorted, np.split(proposal_row, ranks))) == sorted(
            map(sorted, np.split(after, ranks))
        )


@UNHURRIED
@given(placements())
def test_align_never_increases_moves(case: Placements) -> None:
    installed, proposal, ranks = case
    aligned = _native.align(installed, proposal, ranks)
    before = _native.count_moves(installed, proposal, ranks)
    assert _native.count_moves(installed, aligned, ranks) <= before


@UNHURRIED
@given(placements())
def test_align_changes_only_slots_that_receive_a_copy(case: Placements) -> None:
    installed, proposal, ranks = case
    aligned = _native.align(installed, proposal, ranks)
    change_count = int((aligned != installed).sum())
    assert change_count == _native.count_moves(installed, aligned, ranks)


@UNHURRIED
@given(placements())
def test_count_moves_is_multiset_difference_of_ranks(case: Placements) -> None:
    assert _native.count_moves(*case) == slow_moves(*case)


@UNHURRIED
@given(placements(), st.randoms(use_true_random=False))
def test_align_of_shuffled_plan_moves_nothing(case: Placements, random: Random) -> None:
    installed, _, ranks = case
    order = list(range(ranks))
    random.shuffle(order)
    groups = installed.reshape(len(installed), ranks, -1)[:, order, ::-1]
    shuffled = np.ascontiguousarray(groups.reshape(installed.shape))
    assert (_native.align(installed, shuffled, ranks) == installed).all()


def test_align_keeps_slots_and_sorts_new_experts() -> None:
    installed = np.array([[5, 1, 5, 2]], dtype=np.int32)
    proposal = np.array([[9, 2, 5, 7]], dtype=np.int32)
    assert _native.align(installed, proposal, 1).tolist() == [[5, 7, 9, 2]]


def test_align_rejects_greedy_labels_that_keep_fewer_copies() -> None:
    # Proposed rank 0 has 3 experts in common with installed rank 1 and 2 with rank 0; proposed
    # rank 1 has 2 with rank 1 and none with rank 0: greed keeps 3 copies, staying keeps 4.
    installed = np.array([[0, 1, 7, 8, 0, 1, 2, 3]], dtype=np.int32)
    proposal = np.array([[0, 1, 2, 9, 2, 3, 9, 9]], dtype=np.int32)
    aligned = _native.align(installed, proposal, 2)
    assert aligned.tolist() == [[0, 1, 2, 9, 9, 9, 2, 3]]
