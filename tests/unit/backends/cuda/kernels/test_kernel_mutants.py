"""The checks are able to fail: every broken copy of the kernels is found by the check it names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.harnesses.kernel_checks import (
    check_apportioned,
    check_checksum,
    check_commits,
    check_count,
    check_hashed,
    check_levelled,
    check_rule,
    check_solver,
    check_turns,
)
from helpers.strategies.routing_kernel_cases import World, installed, int32
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from helpers.harnesses.kernel_launchers import REAL, Launchers
from helpers.harnesses.triton_interpreter import DEVICE
from helpers.mutants.kernel_mutants import MUTANTS, Mutant

from equipoise.hal.kernels import Tables
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing import build_table, draw_positions, window_begin
from equipoise.hal.routing_rules import RowHash

pytestmark = pytest.mark.slow

SEEDS = 6


def world() -> World:
    """Three experts with four replicas, one, and three, in the second of two layers."""
    placement = int32([0, 1, 0, 2, 0, 2, 0, 2])
    shares = int32([16384, 65536, 16384, 20000, 16384, 0, 16384, 45536])
    return installed(build_table(placement, shares, 3), 2, layers=2, layer=1, word=3)


def batch() -> Tensor:
    """A hundred ids, of which some are padding on either side."""
    return torch.arange(100, dtype=torch.int32) * 7 % 5 - 1


def count(kernels: Launchers) -> None:
    with kernels.small_blocks(16, 32):
        for size in (5, 100):
            check_count(kernels, torch.arange(size, dtype=torch.int32) % 7 - 1, 5)


def check_hashed_routing(kernels: Launchers) -> None:
    check_hashed(kernels, world(), batch(), 1, 2)


def edges(kernels: Launchers) -> None:
    """A share that ends where an element's draw is."""
    draw = 256 * int(draw_positions(torch.tensor(window_begin(2, 0, 9)))) + 128
    table = build_table(int32([0, 0]), int32([draw, 65536 - draw]), 1)
    check_hashed(kernels, installed(table, 1), int32([0]), 2, 9)


def runs(kernels: Launchers) -> None:
    """Four replicas that are all drawn."""
    table = build_table(int32([0, 0, 0, 0]), int32([16384] * 4), 1)
    check_hashed(kernels, installed(table, 1), int32([0] * 60), 2, 9)


def check_apportioned_routing(kernels: Launchers) -> None:
    with kernels.small_numbering(32, 32, 2):
        for rank in range(8):
            check_apportioned(kernels, world(), batch()[: 90 + rank], rank)


def levelled(kernels: Launchers) -> None:
    """Rings, pairs that wait for each other, replicas of one rank; of few rows and of many."""
    placement = int32([0, 1, 2, 0, 3, 4, 0, 1, 1, 4, 2, 5, 6, 0, 6])
    shares = torch.zeros_like(placement)
    for expert in range(7):
        shares[(placement == expert).nonzero()[0]] = 65536
    world = installed(build_table(placement, shares, 7), 5, layers=2, layer=1, word=3)
    ids = torch.arange(60, dtype=torch.int32) ** 2 % 23 % 9 - 1
    with kernels.small_numbering(32, 32, 2):
        check_levelled(kernels, world, ids, 1)
    before = torch.arange(7, dtype=torch.int32) * 5
    for factor in (0, 1 << 22):
        group = GroupCounts(before * (factor + 2) + 30, before * factor + 9)
        check_levelled(kernels, world, ids[:40], 1, group)


def levelled_chain(kernels: Launchers) -> None:
    """A chain of ranks along which rows move for more sweeps than there are."""
    ranks = 20
    placement = [expert for first in range(ranks) for expert in (first, first + 1)]
    shares = [65536, 65536, *[value for _ in range(ranks - 1) for value in (0, 65536)]]
    world = installed(build_table(int32(placement), int32(shares), ranks + 1), ranks)
    group = GroupCounts(int32([10**8, *[10**6] * ranks]), int32([0] * (ranks + 1)))
    check_levelled(kernels, world, int32([0, 1, 1]), 1, group)


def turns(kernels: Launchers) -> None:
    with kernels.small_numbering(32, 32, 2):
        check_turns(kernels, world(), batch(), 1, 32)


def rows(kernels: Launchers) -> None:
    check_rule(kernels, world(), batch(), RowHash(2, int32([3])))


def commits(kernels: Launchers) -> None:
    tables = Tables.empty(2, 2, 3, 1, DEVICE)
    check_commits(kernels, tables, [([1], torch.arange(9).int()[None])])


def bytes_of_blocks(kernels: Launchers) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.module("checksums"), "PROGRAMS", 1)
        check_checksum(kernels, torch.arange(9000).to(torch.uint8), 0)


def solver(kernels: Launchers) -> None:
    """Experts that share ranks, loads of few tokens and of many."""
    for seed in range(SEEDS):
        random, number = torch.Generator().manual_seed(seed), 4 + seed % 4
        spare = torch.randint(0, number, (15 - number,), generator=random)
        order = torch.randperm(15, generator=random)
        placement = torch.cat([torch.arange(number), spare])[order].int()
        shares = torch.zeros_like(placement)
        for expert in range(number):
            shares[(placement == expert).nonzero()[0]] = 65536
        table = build_table(placement, shares, number)
        loads = [torch.randint(0, top, (number,), generator=random) for top in (4, 100000)]
        check_solver(kernels, installed(table, 3), loads)


def sweeps(kernels: Launchers) -> None:
    """A chain of ranks along which the load moves for more sweeps than there are."""
    placement = [expert for first in range(9) for expert in (first, first + 1)]
    shares = [65536, 65536, *[value for _ in range(8) for value in (0, 65536)]]
    world = installed(build_table(int32(placement), int32(shares), 10), 9)
    check_solver(kernels, world, [torch.tensor([10**8, *[10**6] * 9])])


def check_even_load(kernels: Launchers) -> None:
    placement = int32([2, 0, 1, 1, 0, 0, 2, 1, 0])
    shares = int32([65536, 65536, 65536, 0, 0, 0, 0, 0, 0])
    world = installed(build_table(placement, shares, 3), 3)
    check_solver(kernels, world, [torch.tensor([5, 39226, 1])])


SEQUENTIAL = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="broken kernels are judged where they are interpreted"
)
CHECKS: dict[str, Callable[[Launchers], Any]] = {
    "count": count,
    "hashed": check_hashed_routing,
    "edges": edges,
    "runs": runs,
    "apportioned": check_apportioned_routing,
    "levelled": levelled,
    "levelled chain": levelled_chain,
    "turns": turns,
    "rows": rows,
    "commits": commits,
    "checksum": bytes_of_blocks,
    "solver": solver,
    "sweeps": sweeps,
    "even": check_even_load,
}


@pytest.mark.parametrize("name", CHECKS)
def test_healthy_kernels_pass_every_check(name: str) -> None:
    first_failure = None
    try:
        CHECKS[name](Launchers(REAL))
    except AssertionError as failure:
        first_failure = failure
    assert first_failure is None


@SEQUENTIAL
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_kernel_mutant_is_rejected_by_its_check(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutated_kernels = mutant.make(tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[mutant.check](mutated_kernels)
