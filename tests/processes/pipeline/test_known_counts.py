"""Exact shares tell the exchange its sizes: one collective per layer before rows move (G7)."""

from typing import Any

import pytest
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import known_counts
from helpers.strategies.hypothesis_examples import few
from hypothesis import example, given
from hypothesis import strategies as st

LAYERS = 2
GENERATIONS = [[1, 2], [3, 3, 4], [2, 1, 1], [1, 2, 3]]
Case = tuple[list[list[int]], list[Any], int]
"""A placement by layer, expert ids by rank, layer, token and choice, and the number of choices."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Ranks with and without rows, experts with any number of replicas, padding on either side."""
    ranks, experts, top_k = (draw(st.integers(1, most)) for most in (4, 6, 3))
    per_rank = -(-experts // ranks) + draw(st.integers(0, 3))
    spare = per_rank * ranks - experts
    placement = []
    for _ in range(LAYERS):
        extra = draw(st.lists(st.integers(0, experts - 1), min_size=spare, max_size=spare))
        placement.append(draw(st.permutations([*range(experts), *extra])))
    token = st.lists(st.integers(-1, experts), min_size=top_k, max_size=top_k)
    repeats = draw(st.sampled_from([1, 3, 11]))
    batches = [
        [draw(st.lists(token, max_size=6)) * repeats for _ in range(LAYERS)] for _ in range(ranks)
    ]
    return placement, batches, top_k


UNEVEN: Case = (
    [[0, 1, 2, 0, 1, 2], [2, 2, 1, 0, 1, 0]],
    [
        [[[0, 1], [0, 2], [0, -1], [1, 0], [0, 0]] * 3, []],
        [[], [[2, 3], [0, 1], [1, 1]] * 5],
        [[[0, 1]] * 7, [[0, 2], [2, 2], [0, 1]] * 4],
    ],
    2,
)
"""Three ranks, each expert with two replicas, of which some ranks have no rows in one layer."""


def played(ranks: Ranks, case: Case, mutant: str = "") -> list[dict[str, Any]]:
    """What every rank says of every layer."""
    placement, batches, top_k = case
    size = len(batches)
    by_rank = ranks.run(
        known_counts.both_ways,
        size,
        placement=placement,
        batches=batches,
        top_k=top_k,
        mutant=mutant,
    )
    return [verdict for layers in by_rank for verdict in layers]


@few(40)
@given(cases())
@example(UNEVEN)
def test_known_counts_give_the_route_of_the_size_exchange_without_it(
    ranks: Ranks, case: Case
) -> None:
    for verdict in played(ranks, case):
        assert verdict == {"known": ["all_gather"], "told": ["all_to_all"], "difference": ""}


@pytest.mark.parametrize("generations", GENERATIONS)
def test_known_counts_of_other_generation_raise_before_payload(
    ranks: Ranks, generations: list[int]
) -> None:
    for rank, answer in enumerate(refused(ranks, generations)):
        (message,) = answer["raised"]
        assert message.endswith(f"rank {rank} has {generations[rank]}")
        assert answer["issued"] == [["all_gather"]]


def refused(ranks: Ranks, generations: list[int], mutant: str = "") -> list[dict[str, Any]]:
    """What ranks with tables of these generations did; that they go on shows that none waits."""
    size = len(generations)
    answers = ranks.run(known_counts.mismatch, size, generations=generations, mutant=mutant)
    assert sum(answer["received"] for answer in answers) == 3 * len(generations)
    return answers


@pytest.mark.parametrize("mutant", known_counts.MUTANTS)
def test_known_counts_reject_mutant(ranks: Ranks, mutant: str) -> None:
    differences = [verdict["difference"] for verdict in played(ranks, UNEVEN, mutant)]
    raised = [bool(a["raised"]) for case in GENERATIONS for a in refused(ranks, case, mutant)]
    assert any(differences) or not all(raised), f"no rank noticed: {mutant}"
