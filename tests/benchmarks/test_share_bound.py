"""What `shares.py` compares with: the bound holds for a rule, and swaps leave replicas alone."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from helpers.strategies.placement_problems import Problem, problems
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.placement import ExpertShape, Layout

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SAMPLES = 8


def imported(name: str) -> Any:
    """A module of `lib`; the folder of benchmarks is no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return import_module(f"lib.{name}")
    finally:
        sys.path.remove(str(BENCHMARKS))


def placed(problem: Problem) -> tuple[Layout, ExpertShape]:
    planned = plan(problem.load, slots=problem.slots, ranks=problem.ranks, policy="connected")
    layers, experts = problem.load.shape
    shape = ExpertShape(layers, experts, problem.slots, problem.ranks)
    return Layout(planned.placement, planned.shares), shape


def cost(deviations: Any, sources: int) -> float:
    """E |D_1 + ... + D_N|^2, each D drawn from the columns of (ranks, samples)."""
    alone = (deviations**2).sum(axis=0).mean()
    together = (deviations.mean(axis=1) ** 2).sum()
    return float(sources * (alone + (sources - 1) * together))


@given(problem=problems(), sources=st.integers(1, 5), seed=st.integers(0, 1000))
def test_whole_rows_levelled_alone_cost_no_less_than_the_bound(
    problem: Problem, sources: int, seed: int
) -> None:
    routing, bounds = imported("share_routing"), imported("team_bound")
    layout, shape = placed(problem)
    table = routing.Table(layout, 0, shape)
    generator = np.random.default_rng(seed)
    counts = generator.poisson(problem.load[0] / 50 + 0.1, (SAMPLES * sources, shape.experts))
    counts[:, 0] += 1  # no source is without rows
    # The samples are the distribution: then nothing is left to chance.
    bound = bounds.team_bound(counts, counts, table, sources)
    loads = np.array(
        [routing.local(routing.batch_of(row[None], generator), table) for row in counts]
    ).T
    whole = cost(loads - loads.mean(axis=0), sources)
    mean = sources * counts.sum() / counts.shape[0] / shape.ranks
    least = bound.least**2 * shape.ranks * mean**2
    assert least <= whole * (1 + 1e-9) + 1e-6
