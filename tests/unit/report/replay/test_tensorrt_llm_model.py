"""The model of TensorRT-LLM's balancer, against its rules one by one, and its own tests' values."""

import heapq

import numpy as np
import pytest
from helpers.strategies.replay_cases import (
    ReplayCase,
    one_row_each,
    part_of_expert,
    replay_cases,
    window,
)
from hypothesis import given

from equipoise.balancer.experts.placement import ExpertShape, check_placement
from equipoise.report.replay.engines.tensorrt_llm import (
    TENSORRT_LLM,
    greedy_placement,
    update_cadence,
)

(RULE,) = TENSORRT_LLM.rules


def expected_counts(load: list[float], slots: int) -> list[int]:
    """`doReplication`, by a heap of pairs as there."""
    experts = len(load)
    if not sum(load):
        return [slots // experts + (expert < slots % experts) for expert in range(experts)]
    counts = [1] * experts
    heap = [(-weight, -expert) for expert, weight in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(slots - experts):
        expert = -heapq.heappop(heap)[1]
        counts[expert] += 1
        heapq.heappush(heap, (-load[expert] / counts[expert], -expert))
    return counts


def expected_placement(load: list[float], slots: int, ranks: int) -> list[int]:
    """`doPlacement` of those counts, by a heap of ranks that have room."""
    counts = expected_counts(load, slots)
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    replicas = sorted((-load[expert] / counts[expert], expert) for expert in experts)
    heap, filled = [(0.0, rank) for rank in range(ranks)], [0] * ranks
    placement = [-1] * slots
    for size, expert in replicas:
        loaded, rank = heapq.heappop(heap)
        placement[rank * (slots // ranks) + filled[rank]] = expert
        filled[rank] += 1
        if filled[rank] < slots // ranks:
            heapq.heappush(heap, (loaded - size, rank))
    return placement


@given(case=replay_cases())
def test_tensorrt_llm_plan_is_that_of_its_rules(case: ReplayCase) -> None:
    planned = TENSORRT_LLM.planner(window(case.load, case.shape), case.placement, case.shape)
    check_placement(planned, case.shape)
    for layer, load in zip(planned.tolist(), case.load.astype(float).tolist(), strict=True):
        assert layer == expected_placement(load, case.shape.slots, case.shape.ranks)


@pytest.mark.parametrize(
    ("load", "per_rank", "ranks", "counts"),
    [
        ([1, 2, 3, 4], 2, 2, [1, 1, 1, 1]),
        ([0, 0, 0, 0], 3, 2, [2, 2, 1, 1]),
        ([1, 4, 2, 1], 4, 2, [1, 4, 2, 1]),
        ([10, 5, 2, 15, 8], 3, 3, [2, 1, 1, 3, 2]),
        ([0, 10, 0], 2, 2, [1, 2, 1]),
    ],
)
def test_tensorrt_llm_replicas_are_those_of_its_own_tests(
    load: list[int], per_rank: int, ranks: int, counts: list[int]
) -> None:
    """`MoeReplicationTest` in cpp/tests/unit_tests/runtime/moeLoadBalancerTest.cpp."""
    shape = ExpertShape(1, len(load), per_rank * ranks, ranks)
    placement = greedy_placement(np.array([load]), shape)
    assert np.bincount(placement[0]).tolist() == counts


@pytest.mark.parametrize(
    ("load", "per_rank", "ranks", "most"),
    [
        ([1, 1, 1, 1], 2, 2, 0.001),
        ([1, 3, 2, 1], 3, 2, 0.01),
        ([10, 5, 2, 15, 8], 3, 3, 2.0),
        ([1, 100, 10], 2, 2, 9.0),
        ([2, 3, 4, 5, 6, 7], 3, 2, 1.0),
    ],
)
def test_tensorrt_llm_ranks_are_as_level_as_in_its_own_tests(
    load: list[int], per_rank: int, ranks: int, most: float
) -> None:
    """The bounds of `MoePlacementTest` in the same file, of the largest difference of two ranks."""
    shape = ExpertShape(1, len(load), per_rank * ranks, ranks)
    placement = greedy_placement(np.array([load]), shape)[0]
    rows = (np.array(load) / np.bincount(placement))[placement].reshape(ranks, -1).sum(axis=1)
    assert np.ptp(rows) <= most


def expected_slots(ids: list[int], rank: int, placement: list[int]) -> list[int]:
    """The rule for the pairs of one rank, as `computeExpectedRouting` of the kernel's test."""
    slots, seen = [], [0] * len(placement)
    for number, expert in enumerate(ids):
        if number % 1024 == 0:
            seen = [0] * len(placement)
        if expert < 0:
            slots.append(-1)
            continue
        replicas = [slot for slot, held in enumerate(placement) if held == expert]
        slots.append(replicas[(seen[expert] + number // 1024 + rank) % len(replicas)])
        seen[expert] += 1
    return slots


@given(case=replay_cases())
def test_tensorrt_llm_rows_go_round_by_the_rule_of_its_kernel(case: ReplayCase) -> None:
    for layer in range(case.shape.layers):
        routed = RULE.route(case.ids, case.sources, case.placement, case.shape, layer, step=5)
        for rank in range(case.shape.ranks):
            own = case.sources == rank
            expected = expected_slots(
                case.ids[own].reshape(-1).tolist(), rank, case.placement[layer].tolist()
            )
            assert routed[own].reshape(-1).tolist() == expected


def test_tensorrt_llm_rounds_start_anew_in_each_block_of_a_rank() -> None:
    rng = np.random.default_rng(2)
    ids = rng.integers(-1, 8, (2100, 2)).astype(np.int32)
    sources = np.repeat(np.arange(2), [1400, 700]).astype(np.int32)
    placement = np.array([[0, 1, 2, 3, 4, 0, 0, 5, 6, 7, 1, 0]], dtype=np.int32)
    routed = RULE.route(ids, sources, placement, ExpertShape(1, 8, 12, 2), 0, step=0)
    for rank in range(2):
        own = sources == rank
        expected = expected_slots(ids[own].reshape(-1).tolist(), rank, placement[0].tolist())
        assert routed[own].reshape(-1).tolist() == expected


@given(case=replay_cases())
def test_tensorrt_llm_parts_sum_to_one_for_every_expert(case: ReplayCase) -> None:
    sums = part_of_expert(RULE.parts(case.placement, case.shape), case.placement, case.shape)
    np.testing.assert_allclose(sums, 1, rtol=1e-5)


def test_tensorrt_llm_rows_come_to_its_parts() -> None:
    """60 turns of each rank, in one block: equally many to two, three and four replicas."""
    placement = np.array([[0, 0, 1, 1, 1, 2, 2, 2, 2, 3]], dtype=np.int32)
    shape = ExpertShape(1, 4, 10, 2)
    ids, sources = one_row_each(shape, copies=60)
    slots = RULE.route(ids, sources, placement, shape, 0, step=0)
    rows = np.bincount(slots[:, 0], minlength=10) / 120
    np.testing.assert_allclose(rows, RULE.parts(placement, shape)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("layers", "updates", "interval"), [(58, 2, 30), (58, 1, 59), (59, 2, 30), (6, 4, 3), (1, 1, 2)]
)
def test_tensorrt_llm_layers_take_turns_with_a_step_of_rest(
    layers: int, updates: int, interval: int
) -> None:
    """59 layers have groups of unequal size, and no such step."""
    cadence = update_cadence(layers, updates)
    assert (cadence.interval, cadence.layers_per_step) == (interval, updates)
    assert cadence.window == min(interval, 20)
    assert not cadence.blocking
