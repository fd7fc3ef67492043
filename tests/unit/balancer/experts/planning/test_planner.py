"""`plan`, as an operator calls it: budgets, objectives, and one line for what cannot fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.config import Objective, PlanningPolicy, Split
from equipoise.balancer.experts.planning import planner
from equipoise.balancer.experts.planning.inputs import planner_input
from equipoise.balancer.experts.planning.planner import _native_options, select_layers
from equipoise.cli.plan import PlanRequest
from equipoise.hal.errors import PlacementError

LAYERS, EXPERTS, SLOTS, RANKS = 6, 32, 40, 8
Counts = NDArray[np.int64]


def skewed_load(seed: int, windows: int = 1) -> Counts:
    """(windows, layers, experts)."""
    rng = np.random.default_rng(seed)
    odds = np.exp(rng.standard_normal((LAYERS, EXPERTS)))
    return rng.poisson(1000 * odds, (windows, LAYERS, EXPERTS)).astype(np.int64)


def peak(load: Counts, proposal: Any) -> NDArray[np.float64]:
    """max/mean - 1, by layer."""
    rows = np.take_along_axis(load, proposal.placement.astype(np.int64), axis=1) * proposal.shares
    ranks = rows.reshape(LAYERS, RANKS, -1).sum(axis=2)
    worst: NDArray[np.float64] = ranks.max(axis=1) / ranks.mean(axis=1) - 1
    return worst


def test_plan_reports_imbalance_of_its_placement_and_shares() -> None:
    load = skewed_load(1)[0]
    proposal = plan(load, slots=SLOTS, ranks=RANKS)
    assert proposal.placement.shape == proposal.shares.shape == (LAYERS, SLOTS)
    assert proposal.placement.dtype == proposal.shares.dtype == np.int32
    assert proposal.moves == LAYERS * SLOTS
    assert np.abs(proposal.layer_imbalance - peak(load, proposal)).max() < 1e-4
    assert proposal.predicted_imbalance == pytest.approx(proposal.layer_imbalance.mean())


def test_plan_sums_windows_and_repeats_digest_for_equal_load() -> None:
    windows = skewed_load(2, 3)
    plan_of_sum = plan(windows.sum(axis=0), slots=SLOTS, ranks=RANKS)
    assert plan(windows, slots=SLOTS, ranks=RANKS).digest == plan_of_sum.digest
    assert plan(windows.astype(np.int32), slots=SLOTS, ranks=RANKS).digest == plan_of_sum.digest
    assert plan(windows[:2], slots=SLOTS, ranks=RANKS).digest != plan_of_sum.digest


@pytest.mark.parametrize("split", ["shares", "even"])
def test_plan_moves_nothing_again_when_target_is_out_of_reach(split: str) -> None:
    """Two slots a rank: much stays above the target, and one more attempt could find a little."""
    rng = np.random.default_rng(11)
    odds = np.exp(1.2 * rng.standard_normal((2, 24, 64)))
    first_load, second_load = rng.poisson(1000 * odds).astype(np.int64)
    group = {"slots": 96, "ranks": 48, "split": split}
    installed = plan(first_load, **group).placement  # type: ignore[arg-type]
    first = plan(second_load, installed=installed, **group)  # type: ignore[arg-type]
    assert first.layer_imbalance.max() > 0.04
    assert plan(second_load, installed=first.placement, **group).moves == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("load", "group"),
    [
        ([[0, 2, 2]], {"slots": 8, "ranks": 8}),
        ([[0, 2, 0, 1, 1, 1]], {"slots": 16, "ranks": 16, "nodes": 4, "survive": 2}),
        ([[1, 0, 1]], {"slots": 8, "ranks": 8, "nodes": 2, "split": "even"}),
        ([[1, 0, 1, 0, 0]], {"slots": 8, "ranks": 8, "nodes": 2,
                             "installed": [[4, 4, 3, 4, 3, 0, 1, 2]]}),
        ([[1, 0, 2, 0, 2]], {"slots": 8, "ranks": 8, "nodes": 2, "split": "even",
                             "installed": [[0, 1, 4, 0, 1, 4, 2, 3]]}),
    ],
)  # fmt: skip
def test_plan_for_few_rows_terminates(load: list[list[int]], group: dict[str, Any]) -> None:
    """Changes that undo each other, each a gain by rounded loads, once went on for ever."""
    proposal = plan(load, **group)
    again: dict[str, Any] = {**group, "installed": proposal.placement}
    assert plan(load, **again).moves == 0


def test_plan_for_random_few_rows_terminates() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        ranks, per_rank = int(rng.integers(4, 40)), int(rng.integers(1, 4))
        experts = int(rng.integers(ranks * per_rank // 2 + 1, ranks * per_rank + 1))
        load = rng.poisson(rng.gamma(0.5, 1.0, (2, experts))).astype(np.int64)
        for split in ("shares", "even"):
            proposal = plan(load, slots=ranks * per_rank, ranks=ranks, split=split)
            assert [len(np.unique(row)) for row in proposal.placement] == [experts, experts]


@pytest.mark.parametrize("policy", ["incremental", "connected", "greedy"])
@pytest.mark.parametrize("budget", [0, 5, 17, 10_000])
def test_plan_keeps_move_budget_under_every_policy(policy: str, budget: int) -> None:
    installed = plan(skewed_load(4), slots=SLOTS, ranks=RANKS).placement
    group = {"slots": SLOTS, "ranks": RANKS, "installed": installed, "policy": policy}
    proposal = plan(skewed_load(5), max_copies=budget, **group)  # type: ignore[arg-type]
    assert proposal.moves == proposal.layer_moves.sum() <= budget
    by_bytes = plan(
        skewed_load(5),
        byte_budget=budget * 100 + 99,
        expert_bytes=100,
        **group,  # type: ignore[arg-type]
    )
    assert by_bytes.digest == proposal.digest


def test_plan_spends_budget_on_most_uneven_layers() -> None:
    before, later = skewed_load(6)[0], skewed_load(7)[0]
    later[1:] = before[1:]
    installed = plan(before, slots=SLOTS, ranks=RANKS).placement
    proposal = plan(later, slots=SLOTS, ranks=RANKS, installed=installed, max_copies=4)
    assert proposal.layer_moves[0] > 0
    assert proposal.layer_moves[1:].sum() == 0


@pytest.mark.parametrize("policy", ["connected", "greedy"])
@given(seed=st.integers(0, 2**31), budget=st.integers(0, 400))
def test_plan_anew_leaves_no_layer_that_its_budget_still_pays_for(
    policy: str, seed: int, budget: int
) -> None:
    """The worst layer got a part of what it wanted, which was dropped, and the rest got nothing."""
    before, later = skewed_load(seed)[0], skewed_load(seed + 1)[0]
    group: dict[str, Any] = {"slots": SLOTS, "ranks": RANKS, "policy": policy}
    group["installed"] = plan(before, **group).placement
    unlimited_moves = plan(later, **group).layer_moves
    proposal = plan(later, max_copies=budget, **group)
    unpaid_moves = unlimited_moves[proposal.layer_moves == 0]
    assert set(proposal.layer_moves.tolist()) <= {0, *unlimited_moves.tolist()}
    assert (unpaid_moves[unpaid_moves > 0] > budget - proposal.moves).all()


def test_plan_anew_spends_budget_on_most_uneven_layers_that_fit() -> None:
    layer_moves, layer_imbalance = np.array([10, 9, 12, 3]), np.array([0.4, 0.3, 0.2, 0.1])
    assert select_layers(layer_moves, layer_imbalance, 10).tolist() == [True, False, False, False]
    assert select_layers(layer_moves, layer_imbalance, 9).tolist() == [False, True, False, False]
    assert select_layers(layer_moves, layer_imbalance, 14).tolist() == [True, False, False, True]
    assert select_layers(layer_moves, layer_imbalance, 2).tolist() == [False] * 4


def coinciding_load() -> Counts:
    """Windows of four experts: 0 and 1 are busy at the same time, 2 and 3 when those are not."""
    windows = np.full((8, 1, 4), 500)
    windows[::2, 0, :2] = windows[1::2, 0, 2:] = 1500
    return windows


@pytest.mark.parametrize("split", ["shares", "even"])
@pytest.mark.parametrize("policy", ["connected", "incremental"])
def test_plan_separates_experts_busy_at_same_time(policy: str, split: str) -> None:
    installed = [[0, 1, 2, 3]]
    group = {"slots": 4, "ranks": 2, "installed": installed, "policy": policy, "split": split}
    proposal = plan(coinciding_load(), sigma=1.0, **group)  # type: ignore[arg-type]
    homes = [
        rank for expert in range(4) for rank in (int(np.argmax(proposal.placement == expert)) // 2,)
    ]
    assert homes[0] != homes[1]
    assert homes[2] != homes[3]
    assert proposal.moves == 2
    again = plan(coinciding_load(), sigma=1.0, **group | {"installed": proposal.placement})  # type: ignore[arg-type]
    assert again.moves == 0
    if policy == "incremental":
        assert plan(coinciding_load(), sigma=0.0, **group).moves == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [0, 1])
def test_plan_leaves_busy_pairs_when_budget_forbids_a_trade(budget: int) -> None:
    """A trade is two copies."""
    proposal = plan(
        coinciding_load(), slots=4, ranks=2, installed=[[0, 1, 2, 3]], sigma=1.0, max_copies=budget
    )
    assert proposal.moves == 0


def test_plan_accepts_hundreds_of_windows() -> None:
    windows = np.repeat(coinciding_load(), 40, axis=0)
    proposal = plan(windows, slots=4, ranks=2, installed=[[0, 1, 2, 3]], sigma=1.0)
    assert proposal.moves == 2


def changing_load(seed: int) -> Counts:
    """(16, layers, experts): three kinds of traffic, one after the other, with noise."""
    rng = np.random.default_rng(seed)
    kinds = 1000 * np.exp(0.8 * rng.standard_normal((3, LAYERS, EXPERTS)))
    return rng.poisson(kinds[np.arange(16) * 3 // 16]).astype(np.int64)


@pytest.mark.parametrize("split", ["shares", "even"])
def test_plan_sigma_lowers_riskiest_rank(split: str) -> None:
    windows = changing_load(4)
    group = {"slots": SLOTS, "ranks": RANKS, "policy": "connected", "split": split}

    def risk(proposal: Any) -> float:
        """Highest mean + deviation of a rank, mean over layers."""
        slots = np.take_along_axis(windows, proposal.placement[None].astype(np.int64), axis=2)
        rows = (slots * proposal.shares / 65536).reshape(16, LAYERS, RANKS, -1).sum(axis=3)
        return float((rows.mean(axis=0) + rows.std(axis=0, ddof=1)).max(axis=1).mean())

    risk_neutral = plan(windows, sigma=0.0, **group)  # type: ignore[arg-type]
    risk_averse = plan(windows, sigma=1.0, **group)  # type: ignore[arg-type]
    assert risk(risk_averse) < 0.95 * risk(risk_neutral)
    for row in risk_averse.placement:
        assert set(row.tolist()) == set(range(EXPERTS))
        assert all(len(set(rank)) == len(rank) for rank in row.reshape(RANKS, -1).tolist())


def test_plan_active_experts_counts_batches_not_rows() -> None:
    batches = np.zeros((10, 1, 4), dtype=np.int64)
    batches[:, 0, 0] = 1
    batches[0, 0, 1:] = 1000
    rows = plan(batches, slots=5, ranks=5, policy="connected")
    active = plan(batches, slots=5, ranks=5, policy="connected", objective="active_experts")
    assert np.bincount(rows.placement[0]).argmax() != 0
    assert np.bincount(active.placement[0]).argmax() == 0


def test_plan_gives_larger_rank_more_load() -> None:
    load = skewed_load(8)[0]
    capacities = [2.0] + [1.0] * (RANKS - 1)
    proposal = plan(load, slots=SLOTS, ranks=RANKS, capacities=capacities)
    rows = np.take_along_axis(load, proposal.placement.astype(np.int64), axis=1) * proposal.shares
    ranks = rows.reshape(LAYERS, RANKS, -1).sum(axis=2)
    assert np.allclose(ranks[:, 0] / ranks[:, 1:].mean(axis=1), 2.0, rtol=0.05)


def test_plan_node_cost_reduces_copies_between_nodes() -> None:
    """Fewer of what arrives comes from the other node."""
    installed = plan(skewed_load(9), slots=64, ranks=RANKS, nodes=2).placement

    def copies_between_nodes(cost: float) -> int:
        proposal = plan(
            skewed_load(10), slots=64, ranks=RANKS, nodes=2, installed=installed, node_cost=cost
        )
        halves = (installed.reshape(LAYERS, 2, -1), proposal.placement.reshape(LAYERS, 2, -1))
        return sum(
            len(set(after) - set(before))
            for layers in zip(*halves, strict=True)
            for before, after in zip(*layers, strict=True)
        )

    assert copies_between_nodes(100.0) < copies_between_nodes(1.0)


@pytest.mark.parametrize(("survive", "kind"), [(1, "rank"), (2, "node")])
def test_plan_refuses_to_lose_required_redundancy(survive: int, kind: str) -> None:
    """Greedy leaves one copy alone; incremental brings no second one where there is one."""
    load = [[100, 1, 1, 1]]
    group = {"slots": 8, "ranks": 4, "nodes": 2, "survive": survive}
    assert plan(load, policy="connected", **group).moves == 8  # type: ignore[arg-type]
    installed_placement = [[0, 0, 0, 1, 2, 2, 3, 3]]
    for policy in ("greedy", "incremental"):
        with pytest.raises(PlacementError, match=f"survive={survive}: layer 0 has .* one {kind}"):
            plan(load, policy=policy, installed=installed_placement, **group)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load": [[1.0, 2.0]]}, "load must be integers, got float64"),
        ({"load": [1, 2]}, "load must be (layers, experts)"),
        ({"load": np.zeros((0, 4), int)}, "none of them 0"),
        ({"load": [[1, 2], [3, -4]]}, "must not be negative: -4 for expert 1 in layer 1"),
        ({"load": [[2**46, 1]]}, "a layer has more than"),
        ({"slots": 1}, "1 slots cannot hold 2 experts"),
        ({"slots": 3}, "3 slots do not divide among 2 ranks: take a multiple of 2"),
        ({"nodes": 3}, "2 ranks do not divide among 3 nodes"),
        ({"policy": "lucky"}, "policy must be one of greedy, connected, incremental, got 'lucky'"),
        ({"objective": "joy"}, "objective must be one of tokens, active_experts"),
        ({"objective": "active_experts"}, "active_experts takes recorded routing"),
        (
            {"load": [[[5, 7]]] * 2, "objective": "active_experts", "split": "even"},
            "split must be shares",
        ),
        ({"split": "odd"}, "split must be one of shares, even"),
        ({"survive": 1, "slots": 2}, "survive=1 needs two slots an expert: 4, not 2"),
        ({"survive": 2}, "survive=2 needs more than 2 ranks, 1 nodes"),
        ({"survive": 3}, "survive must be 0, 1 or 2"),
        ({"installed": [[0, 0, 0, 0]]}, "layer 0 has no slot for expert(s) [1]"),
        ({"installed": [[0, 1]]}, "a placement is int32 (1, 4)"),
        ({"installed": [[0.0, 1.0, 0.0, 1.0]]}, "installed must be integers"),
        ({"installed": np.array([[0, 1, 0, 2**32]])}, "names an expert outside [0, 2)"),
        ({"max_copies": -1}, "max_copies must not be negative"),
        ({"max_copies": 1.5}, "max_copies must be a whole number, got 1.5"),
        ({"slots": 8.0}, "slots must be a whole number, got 8.0"),
        ({"ranks": "2"}, "ranks must be a whole number, got '2'"),
        ({"nodes": 1.0}, "nodes must be a whole number, got 1.0"),
        ({"survive": True}, "survive must be a whole number, got True"),
        ({"threads": 1.0}, "threads must be a whole number, got 1.0"),
        ({"max_copies": float("nan")}, "max_copies must be a whole number, got nan"),
        ({"byte_budget": 10}, "byte_budget and expert_bytes go together"),
        ({"byte_budget": 10, "expert_bytes": 0}, "expert_bytes must be positive"),
        ({"target": -0.1}, "target must be 0 to 1000"),
        ({"slack": float("nan")}, "slack must be 0 to 1"),
        ({"sigma": -1.0}, "sigma must be 0 to 100"),
        ({"capacities": [1.0]}, "capacities must be 2 positive numbers"),
        ({"capacities": [1e-300, 1e300]}, "capacities must be within a factor of 1024"),
        ({"capacities": [1.0, 0.0]}, "capacities must be 2 positive numbers"),
        ({"capacities": [[1.0], [1.0, 2.0]]}, "capacities must be 2 positive numbers"),
        (
            {"load": [[2**44, 1]], "capacities": [1.0, 10.0]},
            "rows, the most with these capacities",
        ),
        ({"max_copies": 1}, "max_copies needs installed: without it every copy is new"),
        ({"byte_budget": 1, "expert_bytes": 1}, "byte_budget needs installed"),
        ({"slots": 10**30}, "slots must be at most 2147483647, got 1000"),
        ({"sigma": "1"}, "sigma must be a number, got '1'"),
        ({"slack": None}, "slack must be a number, got None"),
        ({"node_cost": "1"}, "node_cost must be a number, got '1'"),
        ({"load": torch.ones(1, 2, requires_grad=True)}, "load is not an array: Can't call numpy"),
        ({"threads": 0}, "threads must be positive"),
        ({"load": [[5, 7], [5]]}, "load is not an array"),
        ({"installed": [[0, 1, 0], [1]]}, "installed is not an array"),
    ],
)
def test_plan_refuses_bad_arguments_in_one_line(changes: dict[str, Any], message: str) -> None:
    valid_arguments: dict[str, Any] = {"load": [[5, 7]], "slots": 4, "ranks": 2}
    with pytest.raises(PlacementError) as error:
        plan(**(valid_arguments | changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "\n" not in str(error.value)


@given(
    st.integers(0, 2**31),
    st.sampled_from((24, 32)),
    st.sampled_from((PlanningPolicy.CONNECTED, PlanningPolicy.INCREMENTAL)),
)
def test_plan_survive_rank_equals_survive_node_with_one_rank_per_node(
    seed: int, slots: int, policy: PlanningPolicy
) -> None:
    """No plan moved anything where every expert had two copies on ranks of different nodes."""
    rng = np.random.default_rng(seed)
    before, after = rng.poisson(1000 * np.exp(rng.standard_normal((2, 3, 12)))).astype(np.int64)
    group: dict[str, Any] = {"slots": slots, "ranks": 4, "nodes": 4}
    for start in (None, plan(before, **group, policy="connected", survive=2).placement):
        rank, node = (
            plan(after, **group, installed=start, policy=policy, survive=survive)
            for survive in (1, 2)
        )
        assert node.digest == rank.digest
        assert node.moves == rank.moves


@given(st.integers(0, 2**31), st.sampled_from(("shares", "even")))
def test_plan_trades_between_nodes_while_experts_survive(seed: int, split: str) -> None:
    """Two copies each: nothing can be given up, so trades are all there is."""
    rng = np.random.default_rng(seed)
    load = rng.poisson(1000 * np.exp(rng.standard_normal((1, 8)))).astype(np.int64)
    start = np.array([[0, 1, 2, 3, 4, 5, 6, 7] * 2], dtype=np.int32)
    group: dict[str, Any] = {"slots": 16, "ranks": 4, "nodes": 2, "survive": 2, "split": split}
    proposal = plan(load, **group, installed=start)
    nodes_of_expert = [
        {s // 8 for s in np.flatnonzero(proposal.placement[0] == expert)} for expert in range(8)
    ]
    assert nodes_of_expert == [{0, 1}] * 8
    without_copies = plan(load, **group, installed=start, max_copies=0)
    assert proposal.predicted_imbalance <= without_copies.predicted_imbalance


def test_plan_trade_between_nodes_lowers_imbalance() -> None:
    """All that is busy is on the first and the third of six ranks, each of which is a node."""
    load = np.array([[9, 9, 9, 9, 9, 9, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]) * 1000
    start = np.arange(36, dtype=np.int32).reshape(1, 36) // 12 * 6 + np.arange(36) % 6
    group: dict[str, Any] = {"slots": 36, "ranks": 6, "nodes": 6, "installed": start}
    without_copies = plan(load, **group, survive=2, max_copies=0)
    proposal = plan(load, **group, survive=2)
    assert proposal.moves > 0
    assert proposal.predicted_imbalance < without_copies.predicted_imbalance


@pytest.mark.parametrize("windows", [1, 4])
@pytest.mark.parametrize("rows", [2**44, 2**46, 2**62, 2**64 - 1])
def test_plan_refuses_more_rows_than_it_can_count(windows: int, rows: int) -> None:
    load = np.full((windows, 1, 4), rows, dtype=np.uint64)
    with pytest.raises(PlacementError, match=f"a layer has more than {2**46 - 1} rows$"):
        plan(load, slots=4, ranks=2)


def test_planner_input_shares_no_memory_with_load_of_caller() -> None:
    """The native core lets other threads run, and they may count on in the same array."""
    load = np.array([[3, 1], [2, 2]], dtype=np.int64)
    planner_load = planner_input(load, None, PlanningPolicy.INCREMENTAL, Objective.TOKENS)
    assert planner_load.load.tolist() == load.tolist()
    assert not np.shares_memory(planner_load.load, load)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["shares", "even"]), st.integers(0, 2))
def test_plan_limit_of_all_slots_of_a_rank_equals_no_limit(
    seed: int, split: str, excess: int
) -> None:
    """What is installed is of another load, so that there is much to change in slots by twos."""
    before, after = skewed_load(seed), skewed_load(seed + 1)
    group: dict[str, Any] = {"slots": SLOTS, "ranks": SLOTS // 2, "split": split}
    installed = plan(before, **group).placement
    unlimited = plan(after, **group, installed=installed)
    limited = plan(after, **group, installed=installed, max_copies_per_rank=2 + excess)
    assert unlimited.digest == limited.digest
    limited_to_one = plan(after, **group, installed=installed, max_copies_per_rank=1)
    copies_per_rank = (limited_to_one.placement != installed).reshape(LAYERS, -1, 2).sum(axis=2)
    assert copies_per_rank.max() <= 1


def test_plan_takes_any_number_of_threads() -> None:
    load = np.full((2, 4), 5)
    many, one = (plan(load, slots=4, ranks=2, threads=threads) for threads in (5000, 1))
    assert many.digest == one.digest


@pytest.mark.parametrize("split", ["shares", "even"])
@pytest.mark.parametrize("target", [0.02, 1000.0])
@pytest.mark.parametrize("sigma", [1.0, 100.0])
def test_plan_of_as_many_rows_as_it_can_count_ends(split: str, target: float, sigma: float) -> None:
    """Twice a target of a thousand means wrapped around, and the search for it never ended."""
    rows = (2**46 - 4) // 4
    windows = np.zeros((4, 2, 4), dtype=np.int64)
    windows[:, 0, 0] = rows
    windows[::2, 1, :2] = windows[1::2, 1, 2:] = rows // 2
    group: dict[str, Any] = {"slots": 14, "ranks": 14, "split": split, "target": target}
    proposal = plan(windows, sigma=sigma, **group)
    again = plan(windows, sigma=sigma, installed=proposal.placement, **group)
    assert again.moves <= proposal.moves


def test_plan_with_unlike_capacities_ends_at_most_rows() -> None:
    """Of a rank of a thousandth the load relative to its capacity wrapped around."""
    capacities = [1.0] * 7 + [1 / 1024]
    load = np.full((1, 8), 78_383_153_151 // 8)
    with pytest.raises(PlacementError, match="more than 78383153151 rows"):
        plan(load + 1, slots=16, ranks=8, capacities=capacities)
    proposal = plan(load, slots=16, ranks=8, capacities=capacities, policy="greedy")
    assert proposal.placement.shape == (1, 16)
    proposal = plan(load, slots=16, ranks=8, capacities=capacities)
    assert proposal.predicted_imbalance < 0.02


@pytest.mark.parametrize(("count", "sigma"), [(7, 0.0), (8, 1.0)])
def test_plan_counts_with_deviations_from_eight_windows_on(count: int, sigma: float) -> None:
    windows = np.concatenate([coinciding_load()[:6], np.full((2, 1, 4), 1000)])[:count]
    group: dict[str, Any] = {"slots": 4, "ranks": 2, "installed": [[0, 1, 2, 3]]}
    proposal = plan(windows, **group)
    assert proposal.digest == plan(windows, sigma=sigma, **group).digest
    assert (proposal.moves > 0) == (sigma > 0)


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("policy", PlanningPolicy)
@pytest.mark.parametrize("windows", [2, 7, 8, 9])
def test_plan_sigma_default_is_that_of_command_line(
    monkeypatch: pytest.MonkeyPatch, policy: PlanningPolicy, objective: Objective, windows: int
) -> None:
    sigmas: list[float] = []

    def aims(
        target: float, slack: float, node_cost: float, sigma: float, split: Split, headroom: int
    ) -> Any:
        sigmas.append(sigma)
        return _native_options(target, slack, node_cost, sigma, split, headroom)

    monkeypatch.setattr(planner, "_native_options", aims)
    load = skewed_load(3, windows)
    plan(load, slots=SLOTS, ranks=RANKS, policy=policy, objective=objective)
    options: dict[str, Any] = {"policy": str(policy), "objective": str(objective)}
    request = PlanRequest(statistics=Path("x.npy"), out=Path("y.json"), **options)
    assert sigmas == [request.sigma_for(windows)]
    uses_sigma = windows >= 8 and policy != PlanningPolicy.GREEDY and objective == Objective.TOKENS
    assert sigmas == [1.0 if uses_sigma else 0.0]
