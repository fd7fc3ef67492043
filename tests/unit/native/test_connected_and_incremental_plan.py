"""Plans: what binds them all, the optimum of shares, and what an incremental one may move."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from equipoise import _native

UNHURRIED = settings(deadline=None)
SHARE_ONE = 65536
MOST = 2**31 - 1
GREEDY, CONNECTED, INCREMENTAL = range(3)
LEVEL, EVEN = range(2)


@dataclass(frozen=True)
class Problem:
    """One layer."""

    load: tuple[int, ...]
    slots: int
    capacity: tuple[int, ...]
    nodes: int = 1
    survive: int = 0

    @property
    def ranks(self) -> int:
        return len(self.capacity)

    @property
    def least(self) -> int:
        return 2 if self.survive else 1


class Answer(NamedTuple):
    placement: tuple[int, ...]
    shares: tuple[int, ...]
    moves: int
    imbalance: float


def solve(
    problem: Problem,
    policy: int = CONNECTED,
    installed: Sequence[int] | None = None,
    allowance: int = MOST,
    split: int = LEVEL,
    target: float = 0.02,
    per_rank: int = MOST,
) -> Answer:
    load = np.array([problem.load], dtype=np.int64)
    aims = [round(target * SHARE_ONE), 6554, SHARE_ONE // 2, SHARE_ONE, 0, split, 0]
    placement, shares, moves, uneven = _native.plan(
        load,
        None,
        problem.slots,
        np.array(problem.capacity, dtype=np.int32),
        problem.nodes,
        problem.survive,
        None if installed is None else np.array([installed], dtype=np.int32),
        policy,
        np.array(aims, dtype=np.int32),
        np.array([allowance], dtype=np.int64),
        per_rank,
        1,
    )
    return Answer(
        tuple(placement[0].tolist()),
        tuple(shares[0].tolist()),
        int(moves[0]),
        int(uneven[0]) / SHARE_ONE,
    )


@st.composite
def problems(draw: st.DrawFn, most: int = 2000, uneven: bool = True) -> Problem:
    """Up to 6 ranks; loads with ties and zeros; two nodes where the ranks allow it."""
    ranks, per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    slots = ranks * per_rank
    nodes = 2 if ranks % 2 == 0 and draw(st.booleans()) else 1
    survive = draw(st.integers(0, nodes if ranks > 1 else 0))
    least = 2 if survive else 1
    experts = draw(st.integers(-(-slots // ranks), max(-(-slots // ranks), slots // least)))
    assume(experts * least <= slots)
    load = draw(st.lists(st.integers(0, most), min_size=experts, max_size=experts))
    sizes = st.integers(SHARE_ONE // 2, 2 * SHARE_ONE) if uneven else st.just(SHARE_ONE)
    capacity = draw(st.lists(sizes, min_size=ranks, max_size=ranks))
    return Problem(tuple(load), slots, tuple(capacity), nodes, survive)


def with_other_load(problem: Problem) -> st.SearchStrategy[Problem]:
    """The same ranks and experts under another load."""
    count = len(problem.load)
    loads = st.lists(st.integers(0, 2000), min_size=count, max_size=count)
    return loads.map(lambda load: replace(problem, load=tuple(load)))


def experts_of(problem: Problem, placement: Sequence[int]) -> list[list[int]]:
    """By rank."""
    per_rank = problem.slots // problem.ranks
    return [list(placement[r * per_rank :][:per_rank]) for r in range(problem.ranks)]


def fullness(problem: Problem, answer: Answer) -> list[Fraction]:
    """Of each rank, relative to its capacity."""
    per_rank = problem.slots // problem.ranks
    rank_loads = [Fraction(0)] * problem.ranks
    for slot, (expert, share) in enumerate(zip(answer.placement, answer.shares, strict=True)):
        rank = slot // per_rank
        rank_loads[rank] += Fraction(problem.load[expert] * share, problem.capacity[rank])
    return rank_loads


def optimum(problem: Problem, placement: Sequence[int]) -> Fraction:
    """The lowest peak of any shares: the most that is confined to some ranks, over what they have.

    By the theorem of Hall, or that of maximum flow and minimum cut.
    """
    members = experts_of(problem, placement)
    homes = [{r for r in range(problem.ranks) if e in members[r]} for e in range(len(problem.load))]
    peak = Fraction(0)
    for size in range(1, problem.ranks + 1):
        for ranks in combinations(range(problem.ranks), size):
            confined = sum(n for n, home in zip(problem.load, homes, strict=True)
                           if home <= set(ranks))  # fmt: skip
            peak = max(peak, Fraction(confined, sum(problem.capacity[r] for r in ranks)))
    return peak * SHARE_ONE


def check(problem: Problem, answer: Answer) -> None:
    """What binds every plan."""
    assert set(answer.placement) == set(range(len(problem.load)))
    assert min(answer.shares) >= 0
    for expert in range(len(problem.load)):
        slots = [s for s, e in enumerate(answer.placement) if e == expert]
        assert sum(answer.shares[s] for s in slots) == SHARE_ONE
    for members in experts_of(problem, answer.placement):
        assert len(set(members)) == len(members)


def survives(problem: Problem, placement: Sequence[int]) -> bool:
    groups = problem.nodes if problem.survive == 2 else problem.ranks
    size = problem.slots // groups
    homes = [{s // size for s, e in enumerate(placement) if e == expert}
             for expert in range(len(problem.load))]  # fmt: skip
    return not problem.survive or min(map(len, homes)) > 1


@UNHURRIED
@given(problems())
def test_connected_plan_places_all_experts_at_most_once_per_rank(problem: Problem) -> None:
    answer = solve(problem)
    check(problem, answer)
    assert survives(problem, answer.placement)


@UNHURRIED
@given(problems())
def test_plan_shares_reach_flow_optimum(problem: Problem) -> None:
    answer = solve(problem)
    best = optimum(problem, answer.placement)
    rounding = Fraction(sum(problem.load) * 2, min(problem.capacity)) + 1
    assert max(fullness(problem, answer)) <= best + rounding


@UNHURRIED
@given(problems())
def test_plan_shares_are_no_worse_than_even_shares(problem: Problem) -> None:
    level = solve(problem)
    even = solve(problem, INCREMENTAL, level.placement, 0, EVEN)
    assert level.placement == even.placement
    assert max(fullness(problem, level)) <= max(fullness(problem, even))


@UNHURRIED
@given(problems(), st.data())
def test_incremental_plan_moves_within_allowance(problem: Problem, data: st.DataObject) -> None:
    installed = solve(problem).placement
    later = data.draw(with_other_load(problem))
    allowance = data.draw(st.integers(0, 6))
    for split in (LEVEL, EVEN):
        answer = solve(later, INCREMENTAL, installed, allowance, split)
        check(later, answer)
        assert survives(later, answer.placement)
        assert answer.moves <= allowance


@UNHURRIED
@given(problems(), st.data())
def test_incremental_plan_fills_few_slots_per_rank(problem: Problem, data: st.DataObject) -> None:
    installed = solve(problem).placement
    later = data.draw(with_other_load(problem))
    most = data.draw(st.integers(0, 3))
    for split in (LEVEL, EVEN):
        stays = solve(later, INCREMENTAL, installed, 0, split)
        answer = solve(later, INCREMENTAL, installed, split=split, per_rank=most)
        check(later, answer)
        assert survives(later, answer.placement)
        difference = np.array(installed) != np.array(answer.placement)
        assert difference.reshape(later.ranks, -1).sum(axis=1).max() <= most
        assert max(fullness(later, answer)) <= max(fullness(later, stays)) + 1


@UNHURRIED
@given(problems(), st.data())
def test_incremental_plan_is_no_worse_than_installed(problem: Problem, data: st.DataObject) -> None:
    installed = solve(problem).placement
    later = data.draw(with_other_load(problem))
    for split in (LEVEL, EVEN):
        stays = solve(later, INCREMENTAL, installed, 0, split)
        moves = solve(later, INCREMENTAL, installed, MOST, split)
        assert max(fullness(later, moves)) <= max(fullness(later, stays)) + 1


@UNHURRIED
@given(problems())
def test_incremental_plan_moves_nothing_when_target_is_met(problem: Problem) -> None:
    installed = solve(problem)
    for target in (installed.imbalance + 0.0001, 1000.0):
        again = solve(problem, INCREMENTAL, installed.placement, target=target)
        assert again.moves == 0
        assert again.imbalance <= installed.imbalance + 0.001


@UNHURRIED
@given(problems(most=10**6, uneven=False), st.randoms(use_true_random=False))
def test_connected_plan_is_independent_of_expert_numbering(
    problem: Problem, random: object
) -> None:
    sizes = {Fraction(n, c) for n in problem.load for c in range(1, problem.ranks + 1)}
    assume(len(sizes) == len(problem.load) * problem.ranks and 0 not in problem.load)
    order = list(range(len(problem.load)))
    random.shuffle(order)  # type: ignore[attr-defined]
    other_problem = replace(problem, load=tuple(problem.load[e] for e in order))
    here, there = solve(problem), solve(other_problem)
    assert sorted(fullness(problem, here)) == sorted(fullness(other_problem, there))
    assert here.placement == tuple(order[e] for e in there.placement)


@UNHURRIED
@given(problems(uneven=False))
def test_connected_plan_connects_ranks_with_spare_copies(problem: Problem) -> None:
    assume(problem.slots - len(problem.load) >= problem.ranks - 1 and problem.survive == 0)
    assume(min(problem.load) > 0)
    component = list(range(problem.ranks))
    for expert in range(len(problem.load)):
        homes = [r for r, members in enumerate(experts_of(problem, solve(problem).placement))
                 if expert in members]  # fmt: skip
        merged = {component[r] for r in homes}
        component = [min(merged) if c in merged else c for c in component]
    assert set(component) == {component[0]}


@UNHURRIED
@given(problems(), st.data(), st.sampled_from([LEVEL, EVEN]))
def test_incremental_plan_keeps_slots_of_staying_experts(
    problem: Problem, data: st.DataObject, split: int
) -> None:
    installed = solve(problem).placement
    later = data.draw(with_other_load(problem))
    placement = solve(later, INCREMENTAL, installed, split=split, target=0.0).placement
    per_rank = problem.slots // problem.ranks
    for slot, expert in enumerate(placement):
        rank = slice(slot // per_rank * per_rank, (slot // per_rank + 1) * per_rank)
        assert installed[slot] == expert or expert not in installed[rank]


@UNHURRIED
@given(problems(), st.data(), st.sampled_from([LEVEL, EVEN]), st.sampled_from([0.0, 0.02, 0.2]))
def test_incremental_plan_is_stable_for_same_load(
    problem: Problem, data: st.DataObject, split: int, target: float
) -> None:
    """Also where the target is out of reach."""
    installed = solve(problem).placement
    later = data.draw(with_other_load(problem))
    first = solve(later, INCREMENTAL, installed, split=split, target=target)
    assert solve(later, INCREMENTAL, first.placement, split=split, target=target).moves == 0


@pytest.mark.slow
@UNHURRIED
@given(problems(), st.randoms(use_true_random=False))
def test_even_split_plan_has_no_second_copy_on_rank(problem: Problem, random: object) -> None:
    """Whatever is installed; the load is level, so that nothing else wants to move."""
    assume(problem.survive == 0 and problem.slots > len(problem.load))
    uniform = replace(problem, load=(1000,) * len(problem.load))
    spare = problem.slots - len(problem.load)
    installed = [*range(len(problem.load)), *[0] * spare]
    random.shuffle(installed)  # type: ignore[attr-defined]
    check(uniform, solve(uniform, INCREMENTAL, installed, split=EVEN, target=1000.0))


def layers_off_by(*parts: float) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Loads and placement of layers on two ranks, whose peaks are so much above their means."""
    load = [
        [round(5000 + 15_000 * part), 5000, 5000, round(5000 - 15_000 * part), 5000, 5000]
        for part in parts
    ]
    return np.array(load, dtype=np.int64), np.array([range(6)] * len(parts), dtype=np.int32)


def layers_with_moves(load: NDArray[np.int64], installed: NDArray[np.int32]) -> list[bool]:
    """Of each layer, with a target of 0.02: trading expert 1 for 3 makes the ranks equal."""
    aims = np.array([1311, 0, 78643, SHARE_ONE, 0, LEVEL, 0], dtype=np.int32)
    capacity, allowance = np.full(2, SHARE_ONE, np.int32), np.full(len(load), MOST)
    _, _, moves, _ = _native.plan(
        load, None, 6, capacity, 1, 0, installed, INCREMENTAL, aims, allowance, MOST, 1
    )
    return [count > 0 for count in moves.tolist()]


def test_plan_keeps_layer_near_target_when_mean_meets_it() -> None:
    assert layers_with_moves(*layers_off_by(0.03, 0.0, 0.0)) == [False, False, False]


def test_plan_changes_layer_near_target_when_mean_misses_it() -> None:
    assert layers_with_moves(*layers_off_by(0.03, 0.03, 0.01)) == [True, True, False]


def test_plan_always_changes_layer_beyond_twice_target() -> None:
    assert layers_with_moves(*layers_off_by(0.05, 0.0, 0.0, 0.0)) == [True, False, False, False]


def test_plan_is_independent_of_thread_count() -> None:
    load: NDArray[np.int64] = np.random.default_rng(5).integers(0, 10_000, (40, 64))
    capacity = np.full(8, SHARE_ONE, dtype=np.int32)
    aims = np.array([1311, 6554, 32768, SHARE_ONE, 0, LEVEL, 0], dtype=np.int32)
    allowance = np.full(40, MOST, dtype=np.int64)

    def plans_of(threads: int) -> list[int]:
        whole = _native.plan(
            load, None, 80, capacity, 1, 0, None, CONNECTED, aims, allowance, MOST, threads
        )
        some = _native.plan(
            load[::-1].copy(), None, 80, capacity, 1, 0, whole[0], INCREMENTAL,
            aims, allowance, MOST, threads
        )  # fmt: skip
        return [number for array in (*whole, *some) for number in array.ravel().tolist()]

    assert plans_of(1) == plans_of(3) == plans_of(64)
