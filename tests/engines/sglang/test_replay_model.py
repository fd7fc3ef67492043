"""The model of SGLang's balancer against SGLang's own functions: plans, maps and dispatch."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from equipoise.balancer.experts.placement import ExpertShape, Placement
from equipoise.report.replay.engine_model import DispatchRule, EngineModel, WindowLoad
from equipoise.report.replay.engines.sglang import DeepseekPlanner, ExpertLocations, LpDispatch
from equipoise.report.replay.engines.sglang import sglang_model as make_model

pytestmark = pytest.mark.timeout(900)
Play = Callable[..., list[Any]]
CASES = 240
LARGE = {"layers": 2, "experts": 256, "slots": 288, "ranks": 32}
LOADS = "equal", "zero", "ties", "skewed", "large", "some zero"
ABOVE_OPTIMUM = 0.03
"""Of max / mean over ranks."""
RULES = {("static", "deepep"): "static", ("dynamic", "none"): "dynamic_rank_invariant"}


def drawn_shape(rng: np.random.Generator, groups: int, nodes: int) -> ExpertShape:
    """A shape that groups and nodes divide."""
    ranks = nodes * int(rng.integers(1, 9))
    per_group = int(rng.integers(1, 13))
    experts = groups * per_group
    least = -(-experts // ranks)
    slots = ranks * int(rng.integers(least, least + 4))
    return ExpertShape(int(rng.integers(1, 4)), experts, slots, ranks)


def drawn_load(rng: np.random.Generator, shape: ExpertShape, kind: str) -> npt.NDArray[np.int64]:
    """(steps, layers, experts) rows, with what plans are sensitive to: ties, zeros, rounding."""
    cells = 2, shape.layers, shape.experts
    match kind:
        case "equal":
            return np.full(cells, 7)
        case "zero":
            return np.zeros(cells, dtype=np.int64)
        case "ties":
            return rng.integers(0, 4, cells)
        case "skewed":
            return (rng.pareto(1.1, cells) * 100).astype(np.int64) % 10**6
        case "large":
            # float32 rounds them; two steps and all layers of int32 do not overflow.
            return rng.integers(2**24, 2**26, cells)
        case _:
            return np.where(rng.random(cells) < 0.5, 0, rng.integers(1, 1000, cells))


def drawn_case(number: int, dispatch: str = "dynamic", backend: str = "none") -> dict[str, Any]:
    """What SGLang is asked, of a plan or of a placement that it starts with."""
    rng = np.random.default_rng((number, len(dispatch)))
    nodes = int(rng.choice([1, 1, 2, 4]))
    groups = nodes * int(rng.integers(1, 4)) if nodes > 1 or rng.random() < 0.3 else None
    large = number % 40 == 0
    shape = ExpertShape(**LARGE) if large else drawn_shape(rng, groups or 1, nodes)
    if large:
        groups, nodes = (None, 1) if number % 80 == 0 else (8, 4)
    load = drawn_load(rng, shape, LOADS[number % len(LOADS)])
    extra = rng.integers(0, shape.experts, (shape.layers, shape.slots - shape.experts))
    every = np.tile(np.arange(shape.experts), (shape.layers, 1))
    placement = rng.permuted(np.concatenate([every, extra], axis=1), axis=1)
    asked = range(shape.ranks) if not large else rng.choice(shape.ranks, 2, replace=False).tolist()
    return {
        "load": load.tolist() if number % 3 else None,
        "placement": placement.tolist(),
        "experts": shape.experts,
        "slots": shape.slots,
        "ranks": shape.ranks,
        "nodes": nodes,
        "groups": groups,
        "dispatch": dispatch,
        "backend": backend,
        "asked": list(asked),
        "ids": rng.integers(0, shape.experts, (int(rng.integers(1, 30)), 3)).tolist(),
    }


def model_of(case: Mapping[str, Any]) -> tuple[EngineModel, ExpertShape, Placement]:
    """The model, and the placement that it has come to."""
    layers = len(case["placement"])
    shape = ExpertShape(layers, case["experts"], case["slots"], case["ranks"])
    model = make_model(case["nodes"])
    placement = np.array(case["placement"], dtype=np.int32)
    if case["load"] is None:
        return model, shape, placement
    load = np.array(case["load"]).sum(axis=0)
    locations = model.rules[0].locations  # type: ignore[attr-defined]
    planner = planner_of(case, locations)
    window = WindowLoad(load, np.zeros((shape.layers, shape.slots), dtype=np.int64), 2)
    return model, shape, planner(window, placement, shape)


def planner_of(case: Mapping[str, Any], locations: ExpertLocations) -> DeepseekPlanner:
    """What SGLang's `auto` chooses: by groups if there are groups that nodes divide."""
    if case["groups"] is None or case["groups"] % case["nodes"]:
        return DeepseekPlanner(locations)
    return DeepseekPlanner(locations, case["groups"], case["nodes"])


def rule_of(model: EngineModel, name: str) -> DispatchRule:
    """The rule of that name."""
    return next(rule for rule in model.rules if rule.name == name)


def answers(play: Play, cases: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Cases with SGLang's answers."""
    (found,) = play("replay_rules:answer", 1, cases=cases)
    yield from zip(cases, found, strict=True)


def test_sglang_plans_are_those_of_its_own_function_ties_included(play: Play) -> None:
    cases = [{**drawn_case(number), "asked": [0], "ids": [[0]]} for number in range(CASES * 3 // 2)]
    planned = [case for case in cases if case["load"] is not None]
    assert len(planned) == CASES
    for case, answer in answers(play, planned):
        _, _, placement = model_of(case)
        np.testing.assert_array_equal(placement, answer["placement"])


@pytest.mark.parametrize(("dispatch", "backend"), RULES)
def test_sglang_ranks_send_rows_to_the_slots_of_the_model(
    play: Play, dispatch: str, backend: str
) -> None:
    """Of plans, and of placements that the server starts with, whose maps are made otherwise."""
    cases = [drawn_case(number, dispatch, backend) for number in range(CASES)]
    for case, answer in answers(play, cases):
        model, shape, placement = model_of(case)
        rule = rule_of(model, RULES[dispatch, backend])
        ids = np.array(case["ids"], dtype=np.int32)
        for rank, of_rank in zip(case["asked"], answer["slots"], strict=True):
            sources = np.full(len(ids), rank, dtype=np.int32)
            for layer, slots in enumerate(of_rank):
                routed = rule.route(ids, sources, placement, shape, layer, step=0)
                np.testing.assert_array_equal(routed, slots)


def test_sglang_dynamic_dispatch_draws_from_the_slots_of_the_model(play: Play) -> None:
    """Numbers of the device are not repeated, but a rank never leaves the slots that it may use."""
    ids = np.repeat(np.arange(12), 8)[:, None].tolist()
    cases = [
        {**drawn_case(number, "dynamic", "deepep"), "ids": ids}
        for number in range(CASES)
        if drawn_case(number)["experts"] >= 12 and number % 40
    ][:40]
    for case, answer in answers(play, cases):
        model, shape, placement = model_of(case)
        location = model.rules[0].locations.of(placement, shape)  # type: ignore[attr-defined]
        for rank, of_rank in zip(case["asked"], answer["slots"], strict=True):
            for layer, slots in enumerate(of_rank):
                for (expert,), (slot,) in zip(ids, slots, strict=True):
                    only = location.narrowed[rank, layer, expert]
                    replicas = location.maps.logical_to_physical[layer, expert]
                    assert slot in ([only] if only >= 0 else replicas)


def test_sglang_linear_solver_is_near_the_optimum_of_the_model(play: Play) -> None:
    """Its reference of the device's solver: five steps in float32, 0 to 3 % above the optimum."""
    rng = np.random.default_rng(5)
    shape = ExpertShape(1, 256, 288, 32)
    cases, best = [], []
    for _ in range(20):
        load = rng.multinomial(65536, rng.dirichlet(np.full(256, 1.5)))[None]
        placement, _ = DeepseekPlanner().plan(load, shape)
        batch = rng.multinomial(16384, (load[0] + 1) / (load[0] + 1).sum())
        parts = LpDispatch(ExpertLocations()).batch_parts(batch[None], placement, shape)
        best.append(largest_rank(parts[0] * batch[placement[0]], shape.ranks))
        case = {"placement": placement[0].tolist(), "load": batch.tolist(), "ranks": shape.ranks}
        cases.append(case)
    (found,) = play("replay_rules:solve", 1, cases=cases)
    reached = [largest_rank(np.array(parts), shape.ranks) for parts in found if parts is not None]
    assert len(reached) == len(cases)
    above = np.array(reached) - best
    print(f"above the optimum: mean {above.mean():.4f}, largest {above.max():.4f}")
    assert above.min() > -1e-4, "the model is not the optimum"
    assert above.max() < ABOVE_OPTIMUM


def largest_rank(slots: npt.NDArray[np.floating[Any]], ranks: int) -> float:
    """Max / mean of the ranks."""
    rows = slots.reshape(ranks, -1).sum(axis=1)
    return float(rows.max() / rows.mean())
