"""The greedy plan against a slow rendering of the published rule, and its invariants."""

from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from random import Random

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from equipoise import _native

UNHURRIED = settings(deadline=None)
MULTIPLE_OF_ALL_COPIES = 27720  # of 1 to 12, the most copies a generated expert gets


@st.composite
def problems(draw: st.DrawFn, largest_load: int = 40) -> tuple[list[int], int, int]:
    """Load per expert, slots, ranks; small loads make ties and zeros common."""
    ranks = draw(st.integers(1, 6))
    per_rank = draw(st.integers(1, 5))
    slots = ranks * per_rank
    experts = draw(st.integers(max(1, slots - 11), slots))
    load = draw(st.lists(st.integers(0, largest_load), min_size=experts, max_size=experts))
    return load, slots, ranks


def replicate(load: list[int], slots: int) -> list[int]:
    if sum(load) == 0:
        each, rest = divmod(slots, len(load))
        return [each + (e < rest) for e in range(len(load))]
    copies = [1] * len(load)
    for _ in range(slots - len(load)):
        heaviest = max(range(len(load)), key=lambda e: (Fraction(load[e], copies[e]), e))
        copies[heaviest] += 1
    return copies


def place(
    load: list[int], copies: list[int], ranks: int, weigh: Callable[[Fraction], Fraction]
) -> list[int]:
    items = [(Fraction(load[e], copies[e]), e) for e in range(len(load)) for _ in range(copies[e])]
    items.sort(key=lambda item: (-item[0], item[1]))
    rank_experts: list[list[int]] = [[] for _ in range(ranks)]
    weight = [Fraction(0)] * ranks
    for size, expert in items:
        free = [r for r in range(ranks) if len(rank_experts[r]) < len(items) // ranks]
        rank = min(free, key=lambda r: (weight[r], r))
        rank_experts[rank].append(expert)
        weight[rank] += weigh(size)
    return [expert for rank in rank_experts for expert in rank]


def plan(load: list[int], slots: int, ranks: int) -> list[int]:
    placement = _native.plan_greedy(np.array([load], dtype=np.int64), slots, ranks)
    return [int(expert) for expert in placement[0]]


@UNHURRIED
@given(problems())
def test_greedy_plan_equals_published_rule_for_exact_loads(
    problem: tuple[list[int], int, int],
) -> None:
    load, slots, ranks = problem
    load = [n * MULTIPLE_OF_ALL_COPIES for n in load]
    assert plan(load, slots, ranks) == place(load, replicate(load, slots), ranks, lambda s: s)


@UNHURRIED
@given(problems(largest_load=10**12))
def test_greedy_plan_rounds_rank_loads_to_a_65536th(problem: tuple[list[int], int, int]) -> None:
    load, slots, ranks = problem
    expected = place(load, replicate(load, slots), ranks, lambda s: Fraction(int(s * 65536)))
    assert plan(load, slots, ranks) == expected


@UNHURRIED
@given(problems(), st.randoms(use_true_random=False))
def test_greedy_plan_follows_expert_renaming_without_ties(
    problem: tuple[list[int], int, int], random: Random
) -> None:
    load, slots, ranks = problem
    sizes = [{Fraction(n, c) for c in range(1, 13)} for n in load]
    assume(all(a.isdisjoint(b) for a, b in combinations(sizes, 2)))
    names = list(range(len(load)))
    random.shuffle(names)
    other_load = [0] * len(load)
    for expert, name in enumerate(names):
        other_load[name] = load[expert]
    assert plan(other_load, slots, ranks) == [names[expert] for expert in plan(load, slots, ranks)]


@UNHURRIED
@given(problems(), st.integers(1, 4))
def test_greedy_plan_treats_layers_independently(
    problem: tuple[list[int], int, int], layers: int
) -> None:
    load, slots, ranks = problem
    rows = [[n * (layer + 1) % 41 for n in load] for layer in range(layers)]
    placement = _native.plan_greedy(np.array(rows, dtype=np.int64), slots, ranks)
    assert placement.tolist() == [plan(row, slots, ranks) for row in rows]


def test_greedy_plan_without_load_keeps_natural_order() -> None:
    assert plan([0] * 12, 12, 4) == list(range(12))


def test_greedy_plan_tie_gives_copy_to_higher_expert() -> None:
    assert sorted(plan([7, 7, 7, 1], 5, 1)) == [0, 1, 2, 2, 3]


def test_greedy_plan_compares_loads_beyond_double_precision() -> None:
    # After 509 and 521 copies the first expert's load per copy is larger by one part in 2**54.
    load, copies = [33_425_153_484_482, 34_213_172_820_069], (509, 521)
    assert load[0] / copies[0] == load[1] / copies[1]
    assert Fraction(load[0], copies[0]) > Fraction(load[1], copies[1])
    assert plan(load, sum(copies) + 1, 1).count(0) == copies[0] + 1
