"""What it costs that hashed routing follows shares to one 256th of an expert."""

import numpy as np
import pytest
import torch

from equipoise.balancer.experts.placement import ExpertShape, Placement, Shares, solve_shares
from equipoise.balancer.experts.routing.layer_update import build_tables
from equipoise.hal.routing import POSITIONS, position_counts

SIZES = (
    (256, 288, 32),
    (256, 320, 64),
    (384, 448, 64),
    (128, 144, 16),
    (32, 40, 4),
    (256, 384, 128),
)
MOST = 0.003
"""Most by which imbalance may rise, mean over three seeds."""


def greedy_placement(load: np.ndarray, slots: int, ranks: int) -> Placement:
    """Replicas where the load of one is highest, then each on the rank with the least load."""
    copies = np.ones(len(load), dtype=int)
    for _ in range(slots - len(load)):
        copies[np.argmax(np.where(copies < ranks, load / copies, -1))] += 1
    replica_loads = sorted(
        (load[e] / copies[e], e) for e in range(len(load)) for _ in range(copies[e])
    )
    rank_experts: list[list[int]] = [[] for _ in range(ranks)]
    rank_load = np.zeros(ranks)
    for replica_load, expert in reversed(replica_loads):
        open_ranks = [rank for rank in range(ranks) if len(rank_experts[rank]) < slots // ranks]
        rank = min(open_ranks, key=lambda rank: (expert in rank_experts[rank], rank_load[rank]))
        rank_experts[rank].append(int(expert))
        rank_load[rank] += replica_load
    return np.array([rank_experts], dtype=np.int32).reshape(1, slots)


def imbalance(load: np.ndarray, placement: Placement, parts: np.ndarray, ranks: int) -> float:
    """(max - mean) / mean of rank loads; `parts` are the shares of slots, of 1."""
    levels = (load[placement[0]] * parts).reshape(ranks, -1).sum(1)
    return float(levels.max() / levels.mean() - 1)


def rounded_shares(placement: Placement, shares: Shares, shape: ExpertShape) -> np.ndarray:
    """The part of its expert's positions that each slot has."""
    tables = build_tables(placement, shares, shape, range(1))
    end_counts = position_counts(tables.cumulative[0])
    start_counts = torch.cat([end_counts.new_zeros(1), end_counts[:-1]])
    start_counts[tables.start[0, :-1].long()] = 0
    fractions = torch.empty(shape.slots, dtype=torch.float64)
    fractions[tables.replicas[0].long()] = (end_counts - start_counts).double() / POSITIONS
    return fractions.numpy()


@pytest.mark.parametrize("sigma", [0.6, 1.0])
@pytest.mark.parametrize(("experts", "slots", "ranks"), SIZES)
def test_rounding_shares_to_positions_costs_little_balance(
    experts: int, slots: int, ranks: int, sigma: float
) -> None:
    shape, rises = ExpertShape(layers=1, experts=experts, slots=slots, ranks=ranks), []
    for seed in range(3):
        load = (np.exp(np.random.default_rng(seed).normal(0, sigma, experts)) * 1000).astype(int)
        placement = greedy_placement(load, slots, ranks)
        shares = solve_shares(load[None], placement, shape)
        exact = imbalance(load, placement, shares[0] / 65536, ranks)
        rises.append(
            imbalance(load, placement, rounded_shares(placement, shares, shape), ranks) - exact
        )
    print(f"{experts} experts, {slots} slots, {ranks} ranks, {sigma}: {np.mean(rises):.4f}")
    assert np.mean(rises) <= MOST
