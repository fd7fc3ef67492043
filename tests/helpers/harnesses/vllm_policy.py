"""Loads and placements that a policy is given, and what it may make of them."""

from dataclasses import dataclass

import numpy as np
from helpers.strategies.placement_problems import Problem, problems
from hypothesis import strategies as st
from numpy.typing import NDArray

from equipoise.balancer.experts.placement import ExpertShape, Placement

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Standing:
    """A problem, and what is installed; it may be any placement of all experts."""

    problem: Problem
    installed: Placement

    @property
    def shape(self) -> ExpertShape:
        problem = self.problem
        return ExpertShape(problem.load.shape[0], problem.experts, problem.slots, problem.ranks)


@st.composite
def standings(draw: st.DrawFn) -> Standing:
    problem = draw(problems())
    rest = problem.slots - problem.experts
    others = st.lists(st.integers(0, problem.experts - 1), min_size=rest, max_size=rest)
    rows = [draw(st.permutations([*range(problem.experts), *draw(others)])) for _ in problem.load]
    return Standing(problem, np.array(rows, dtype=np.int32))


def popular(seed: int, layers: int, experts: int) -> NDArray[np.float64]:
    """Popularity of experts, log-normal."""
    return np.random.default_rng(seed).lognormal(sigma=1.0, size=(layers, experts))


def window(popularity: NDArray[np.float64], seed: int, tokens: int = 1_000_000) -> Counts:
    """A sample of it, (layers, experts)."""
    rng = np.random.default_rng((seed, 1))
    odds = popularity / popularity.sum(axis=1, keepdims=True)
    return np.stack([rng.multinomial(tokens, row) for row in odds]).astype(np.int64)


def first_map(shape: ExpertShape) -> Placement:
    """As engines lay out experts at the start: in order, then the first ones again."""
    row = np.arange(shape.slots, dtype=np.int32) % shape.experts
    return np.tile(row, (shape.layers, 1))


def fullest(load: Counts, placement: NDArray[np.integer], ranks: int) -> NDArray[np.float64]:
    """(layers,): load of the fullest rank under an even split."""
    loads = []
    for rows, row in zip(load, placement, strict=True):
        copies = np.bincount(row, minlength=load.shape[1])
        loads.append((rows / np.maximum(copies, 1))[row].reshape(ranks, -1).sum(axis=1).max())
    return np.array(loads)


def balanced(load: Counts, placement: NDArray[np.integer], ranks: int) -> float:
    """Mean over ranks divided by the largest, both summed over layers."""
    return float(load.sum() / ranks / fullest(load, placement, ranks).sum())


def fetched(old: NDArray[np.integer], new: NDArray[np.integer], ranks: int) -> int:
    """Experts that ranks get and did not have."""
    before, after = (each.reshape(len(each), ranks, -1) for each in (old, new))
    return sum(
        len(set(now.tolist()) - set(was.tolist()))
        for layer_before, layer_after in zip(before, after, strict=True)
        for was, now in zip(layer_before, layer_after, strict=True)
    )
