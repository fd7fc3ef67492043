"""TensorRT-LLM's two calls: counts first, then a placement of just these counts."""

import numpy as np
import pytest
from helpers.references.published_placement_rule import copies_of, is_double, rank_loads, ranks_of
from helpers.strategies.placement_problems import Problem, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.compat.tensorrt_llm import (
    MoeLoadBalanceMetaInfo,
    MoePlacementCpuInfo,
    do_placement,
    do_replication,
)
from equipoise.hal.errors import PlacementError

UNHURRIED = settings(deadline=None)


def meta(problem: Problem) -> MoeLoadBalanceMetaInfo:
    size = problem.slots // problem.ranks
    return MoeLoadBalanceMetaInfo(problem.experts, 2, 0, problem.ranks, size)


@UNHURRIED
@given(problems(), st.sampled_from(["best", "connected"]))
def test_do_placement_uses_counts_of_do_replication(problem: Problem, policy: str) -> None:
    load, info = problem.load[0].tolist(), MoePlacementCpuInfo()
    do_replication(meta(problem), load, info, policy=policy)
    counts = list(info.expert_replica_count)
    do_placement(meta(problem), load, info, policy=policy)
    row = [expert for rank in info.rank_expert_ids for expert in rank]
    assert [len(rank) for rank in info.rank_expert_ids] == [problem.slots // problem.ranks] * (
        problem.ranks
    )
    assert [row.count(expert) for expert in range(problem.experts)] == counts
    assert not is_double(row, problem.ranks)


@UNHURRIED
@given(problems())
def test_greedy_policy_equals_published_rule(problem: Problem) -> None:
    load, info = problem.load[0].tolist(), MoePlacementCpuInfo()
    do_replication(meta(problem), np.array(load, dtype=np.float32), info, policy="greedy")
    assert info.expert_replica_count == copies_of(load, problem.slots)
    do_placement(meta(problem), np.array(load, dtype=np.float32), info, policy="greedy")
    assert info.rank_expert_ids == ranks_of(load, info.expert_replica_count, problem.ranks)


@UNHURRIED
@given(problems(), st.data())
def test_do_placement_accepts_counts_of_the_caller(problem: Problem, data: st.DataObject) -> None:
    load, counts = problem.load[0].tolist(), [1] * problem.experts
    ids = st.integers(0, problem.experts - 1)
    for _ in range(problem.slots - problem.experts):
        counts[data.draw(ids)] += 1
    info = MoePlacementCpuInfo(expert_replica_count=list(counts))
    do_placement(meta(problem), load, info, policy="greedy")
    assert info.rank_expert_ids == ranks_of(load, counts, problem.ranks)


def test_best_policy_is_more_level_than_published_rule() -> None:
    rng = np.random.default_rng(2)
    load = rng.poisson(1000 * np.exp(rng.standard_normal(64))).tolist()
    problem = Problem(np.array([load]), 80, 16)
    highest = []
    for policy in ("best", "greedy"):
        info = MoePlacementCpuInfo()
        do_replication(meta(problem), load, info, policy=policy)
        do_placement(meta(problem), load, info, policy=policy)
        row = [expert for rank in info.rank_expert_ids for expert in rank]
        highest.append(max(rank_loads(row, load, 16)))
    assert highest[0] < highest[1]


@pytest.mark.parametrize(
    ("load", "counts", "message"),
    [
        ([1, 2], [2, 1, 1], r"expert_load_factor must be \(3,\), got \(2,\)"),
        ([1, 2, 3], [2, 2, 1], "must be 3 positive numbers that sum to 4"),
        ([1, 2, 3], [4, 0, 0], "must be 3 positive numbers that sum to 4"),
        ([1, 2, float("inf")], [2, 1, 1], r"expert_load_factor\[0, 2\] is inf"),
    ],
)
def test_do_placement_refuses_bad_arguments_in_one_line(
    load: list[float], counts: list[int], message: str
) -> None:
    info = MoePlacementCpuInfo(expert_replica_count=counts)
    with pytest.raises(PlacementError, match=message):
        do_placement(MoeLoadBalanceMetaInfo(3, 1, 0, 2, 2), load, info)
