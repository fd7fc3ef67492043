"""Plans, dispatch and first placement that replay computes for vllm-ascend equal its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.harnesses.vllm_policy import popular, window
from numpy.typing import NDArray

from equipoise.balancer.experts.placement import ExpertShape, Load, Placement
from equipoise.hal.errors import PlacementError
from equipoise.report.replay.engine_model import Planner, WindowLoad
from equipoise.report.replay.engines.vllm_ascend import (
    ReplicaByRank,
    initial_placement,
    vllm_ascend_model,
)

Play = Callable[..., list[Any]]
CASES = 300
REAL = ExpertShape(layers=8, experts=256, slots=288, ranks=32)
VLLM_ASCEND = vllm_ascend_model(REAL.layers)


def place_apart(
    rng: np.random.Generator, experts: int, ranks: int, size: int, layers: int
) -> Placement:
    """All experts, the rest drawn, none twice on a rank."""
    rows = []
    for _ in range(layers):
        left = np.full(ranks, size)
        held: list[list[int]] = [[] for _ in range(ranks)]
        for expert in rng.permutation(experts):
            rank = int(rng.choice(np.flatnonzero(left)))
            held[rank].append(int(expert))
            left[rank] -= 1
        for rank in np.flatnonzero(left).tolist():
            others = np.setdiff1d(np.arange(experts), held[rank])
            held[rank].extend(rng.choice(others, left[rank], replace=False).tolist())
        rows.append(np.concatenate([rng.permutation(each) for each in held]))
    return np.array(rows, dtype=np.int32)


def draw_rows(rng: np.random.Generator, shape: tuple[int, int]) -> Load:
    """Rows of slots: ties, zeros, layers of nothing, even ones, and numbers past float32."""
    kind = rng.integers(7)
    if kind == 0:
        return np.full(shape, rng.integers(0, 3), dtype=np.int64)
    if kind == 1:
        return rng.integers(0, 4, shape)
    if kind == 2:
        return rng.integers(950, 1050, shape)
    if kind == 5:
        # Swaps that gain less than float32 tells are tried where the first layer has few rows.
        rows = 2**24 * rng.integers(1, 4, shape) + rng.integers(0, 3, shape)
        rows[0] = rng.integers(0, 2, shape[1])
        return rows
    rows = (rng.lognormal(sigma=1.5, size=shape) * 10 ** rng.integers(1, 9)).astype(np.int64)
    if kind == 3:
        rows[rng.integers(shape[0])] = 0
    if kind == 4:
        rows[rng.random(shape) < 0.5] = 0
    return rows


def drawn(seed: int) -> tuple[ExpertShape, Placement, Load]:
    rng = np.random.default_rng(seed)
    ranks, size = int(rng.integers(1, 9)), int(rng.integers(1, 13))
    least = max(size, ranks * size - 2 * ranks)
    experts = int(rng.integers(least, ranks * size + 1))
    shape = ExpertShape(int(rng.integers(1, 4)), experts, ranks * size, ranks)
    installed = place_apart(rng, experts, ranks, size, shape.layers)
    return shape, installed, draw_rows(rng, installed.shape)


def by_rank(slots: NDArray[Any], shape: ExpertShape) -> list[list[list[int]]]:
    rows: list[list[list[int]]] = slots.reshape(len(slots), shape.ranks, -1).tolist()
    return rows


def window_of(rows: Load, installed: Placement, shape: ExpertShape) -> WindowLoad:
    experts = np.zeros((shape.layers, shape.experts), dtype=np.int64)
    np.add.at(experts, (np.arange(shape.layers)[:, None], installed), rows)
    return WindowLoad(experts, rows, steps=1)


@pytest.fixture(params=["swift", "default"])
def policy(request: pytest.FixtureRequest) -> tuple[str, Planner]:
    policies = {"swift": VLLM_ASCEND.planner, "default": VLLM_ASCEND.policies["default_eplb"]}
    return request.param, policies[request.param]


def test_replay_plans_equal_vllm_ascend_for_drawn_loads(
    play: Play, policy: tuple[str, Planner]
) -> None:
    name, planner = policy
    drawings = [drawn(seed) for seed in range(CASES)]
    problems = [
        {"installed": by_rank(installed, shape), "load": by_rank(rows, shape)}
        for shape, installed, rows in drawings
    ]
    (answers,) = play("replay_cases:plans", 1, policy=name, problems=problems)
    refused = 0
    for seed, (shape, installed, rows) in enumerate(drawings):
        load = window_of(rows, installed, shape)
        if isinstance(answers[seed], str):
            refused += 1
            with pytest.raises(PlacementError):
                planner(load, installed, shape)
            continue
        planned = planner(load, installed, shape)
        assert by_rank(planned, shape) == answers[seed], f"seed {seed}: {shape}"
    assert refused == 0 if name == "swift" else 0 < refused < CASES / 2


def test_replay_plans_equal_vllm_ascend_over_rebalances_at_real_size(
    play: Play, policy: tuple[str, Planner]
) -> None:
    name, planner = policy
    installed = VLLM_ASCEND.initial(REAL)
    for seed in range(3):
        experts = window(popular(seed, REAL.layers, REAL.experts), seed)
        experts[1] = experts[1] // 4000
        experts[2] = experts[2] // 100 * 100
        sources = VLLM_ASCEND.rules[0].parts(installed, REAL)
        rows = (np.take_along_axis(experts, installed.astype(np.int64), axis=1) * sources).astype(
            np.int64
        )
        problem = {"installed": by_rank(installed, REAL), "load": by_rank(rows, REAL)}
        (answers,) = play("replay_cases:plans", 1, policy=name, problems=[problem])
        installed = planner(window_of(rows, installed, REAL), installed, REAL)
        assert by_rank(installed, REAL) == answers[0]


def test_replay_routes_as_vllm_ascend_for_drawn_placements(play: Play) -> None:
    drawings = [drawn(seed)[:2] for seed in range(CASES)]
    sizes = [1 + seed % 3 for seed in range(CASES)]
    problems = [
        {"installed": by_rank(installed, shape)[0], "tp_size": size}
        for (shape, installed), size in zip(drawings, sizes, strict=True)
    ]
    (answers,) = play("replay_cases:dispatch", 1, problems=problems)
    for (shape, installed), size, answer in zip(drawings, sizes, answers, strict=True):
        sources = np.arange(shape.ranks, dtype=np.int32)
        ids = np.tile(np.arange(shape.experts, dtype=np.int32), (shape.ranks, 1))
        rule = ReplicaByRank(tp_size=size)
        assert rule.route(ids, sources, installed, shape, layer=0, step=0).tolist() == answer


def test_replay_initial_placement_is_that_of_vllm_ascend(play: Play) -> None:
    numbers = np.random.default_rng(0).integers(1, [60, 9, 20], (CASES, 3)) - [0, 0, 1]
    shapes = [[256, 32, 32], [256, 32, 0], *numbers.tolist()]
    shapes = [each for each in shapes if (each[0] + each[2]) % each[1] == 0]
    (answers,) = play("replay_cases:first_placements", 1, shapes=shapes)
    refused = 0
    for (experts, ranks, redundant), answer in zip(shapes, answers, strict=True):
        shape = ExpertShape(1, experts, experts + redundant, ranks)
        held = np.sort(np.array(answer), axis=1)
        if held.max() >= experts or (np.diff(held, axis=1) == 0).any():
            refused += 1
            with pytest.raises(PlacementError):
                initial_placement(shape)
        else:
            assert by_rank(initial_placement(shape), shape)[0] == answer
    assert 0 < refused < len(shapes) / 2


def test_replay_cadence_has_defaults_of_vllm_ascend(play: Play) -> None:
    (defaults,) = play("replay_cases:defaults", 1)
    cadence = VLLM_ASCEND.cadence
    assert defaults["eplb_policy_type"] == 2
    assert defaults["expert_heat_collection_interval"] == cadence.window == cadence.first
    delay = defaults["algorithm_execution_interval"]
    assert cadence.latency == delay + 1
    assert cadence.interval == cadence.window + delay + REAL.layers
