"""Shares solved on the device against the reference, bit for bit: clause G4."""

import pytest
import torch
from helpers.harnesses.kernel_checks import check_solver
from helpers.strategies.hypothesis_examples import few
from helpers.strategies.routing_kernel_cases import World, installed, int32, worlds
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from helpers.harnesses.kernel_launchers import REAL, Launchers, guarded, on_device

from equipoise.hal.kernels import Tables
from equipoise.hal.routing import RoutingTable, build_table, solve_cumulative

pytestmark = pytest.mark.slow

KERNELS = Launchers(REAL)
LARGEST = 1 << 30
"""Tokens of an expert; with int32 and int64 counts alike."""


def loads(experts: int) -> st.SearchStrategy[Tensor]:
    """Few tokens, where rounding decides, or very many; some experts without any."""
    one = st.integers(0, 5) | st.integers(0, 300) | st.integers(0, LARGEST)
    dtypes = st.sampled_from((torch.int32, torch.int64))
    values = st.lists(one, min_size=experts, max_size=experts)
    return st.builds(lambda elements, dtype: torch.tensor(elements, dtype=dtype), values, dtypes)


@st.composite
def worlds_and_loads(draw: st.DrawFn) -> tuple[World, list[Tensor]]:
    world = draw(worlds())
    several = st.lists(loads(world.table.experts), min_size=1, max_size=3)
    return world, draw(several)


@few(10)
@given(worlds_and_loads())
def test_solve_shares_equals_the_reference(case: tuple[World, list[Tensor]]) -> None:
    check_solver(KERNELS, *case)


@st.composite
def dependent_worlds(draw: st.DrawFn) -> tuple[World, list[Tensor]]:
    """Few ranks and many experts with two to all of them: every wave waits for another."""
    ranks, slots, experts = draw(st.sampled_from(((2, 6, 3), (3, 15, 7), (4, 24, 16), (5, 30, 12))))
    rest = slots - experts
    extra = draw(st.lists(st.integers(0, experts - 1), min_size=rest, max_size=rest))
    placement = int32(draw(st.permutations([*range(experts), *extra])))
    table = table_of(placement, experts)
    return installed(table, ranks), draw(st.lists(loads(experts), min_size=1, max_size=2))


def table_of(placement: Tensor, experts: int) -> RoutingTable:
    """All of an expert's share is on its first slot: the solver does not read shares."""
    shares = torch.zeros_like(placement)
    for expert in range(experts):
        shares[(placement == expert).nonzero()[0]] = 65536
    return build_table(placement, shares, experts)


@few(10)
@given(dependent_worlds())
def test_solve_shares_refills_experts_with_shared_ranks_in_order(
    case: tuple[World, list[Tensor]],
) -> None:
    check_solver(KERNELS, *case)


def large(seed: int, hot: int) -> tuple[World, Tensor]:
    """256 experts over 288 slots of 32 ranks; the spare slots go to the first `hot` experts."""
    source = torch.Generator().manual_seed(seed)
    spare = torch.randint(0, hot, (32,), generator=source)
    order = torch.randperm(288, generator=source)
    placement = torch.cat([torch.arange(256), spare])[order].int()
    load = (torch.rand(256, generator=source) ** 4 * 2000).long()
    return installed(table_of(placement, 256), 32), load


@pytest.mark.parametrize(
    ("seed", "hot"),
    [
        (2, 30),
        (3, 8),
        pytest.param(1, 256, marks=pytest.mark.deep),
        pytest.param(4, 1, marks=pytest.mark.deep),
    ],
)
def test_solve_shares_of_256_experts_equals_the_reference(seed: int, hot: int) -> None:
    world, load = large(seed, hot)
    check_solver(KERNELS, world, [load, load // 100, load.flip(0)])


@pytest.mark.parametrize("ranks", [pytest.param(33, marks=pytest.mark.deep), 64])
def test_solve_shares_supports_more_ranks_than_warp_lanes(ranks: int) -> None:
    """And one expert with a replica on each of them."""
    placement = torch.zeros(2 * ranks, dtype=torch.int32)
    placement[::2] = torch.arange(ranks) % 5 + 1
    load = torch.tensor([1000, 900, 1, 0, 800, 7])
    check_solver(KERNELS, installed(table_of(placement, 6), ranks), [load, load * 100003])


def test_solve_shares_supports_more_experts_than_one_block() -> None:
    placement = torch.cat([torch.arange(300), torch.arange(300) % 100]).int()
    load = torch.arange(300) * 37 % 101
    check_solver(KERNELS, installed(table_of(placement, 300), 6), [load])


@pytest.mark.parametrize(
    ("placement", "ranks", "load"),
    [
        ([2, 0, 1, 1, 0, 0, 2, 1, 0], 3, [5, 39226, 1]),
        ([2, 1, 1, 1, 0, 2, 0, 0, 2], 3, [3, 2, 71758]),
        ([1, 2, 0, 1, 2, 0, 2, 1, 1], 3, [0, 1, 85614]),
    ],
)
def test_solve_shares_stays_even_when_rounding_would_hurt(
    placement: list[int], ranks: int, load: list[int]
) -> None:
    """Found by search: the ranks are level before the rounding, and one of them is not after."""
    world = installed(table_of(int32(placement), 3), ranks)
    even = []
    for size in world.table.start.diff().tolist():
        shares = torch.tensor([65536 // size + (k < 65536 % size) for k in range(size)])
        even += shares.cumsum(0).tolist()
    assert solve_cumulative(torch.tensor(load), world.table, ranks).tolist() == even
    check_solver(KERNELS, world, [torch.tensor(load)])


def test_solve_shares_with_uncommitted_tables_writes_nothing() -> None:
    tables = Tables.empty(1, 3, 4, 2, on_device(torch.empty(0)).device)
    whole, cumulative = guarded(4, 0)
    load = on_device(torch.tensor([5, 0, 7]))
    KERNELS.solve_shares(load, tables, 0, cumulative, KERNELS.workspace(3, 4, 2))
    assert set(whole.tolist()) == {-7}


def test_solve_shares_refuses_workspace_of_other_tables() -> None:
    world = installed(table_of(int32([0, 1]), 2), 2)
    with pytest.raises(ValueError, match="tables: expected those of"):
        KERNELS.solve_shares(
            torch.zeros(2), world.tables, 0, torch.zeros(2), KERNELS.workspace(2, 2, 1)
        )


def test_solve_shares_equals_the_reference_on_320_ranks() -> None:
    """More ranks than a warp of the solver has lanes; on a GPU its warps meet after every wave."""
    ranks, experts, slots = 320, 256, 640
    generator = torch.Generator().manual_seed(7)
    extra = torch.randint(experts, (slots - experts,), generator=generator)
    placement = int32([*range(experts), *extra.tolist()])
    placement = placement[torch.randperm(slots, generator=generator)]
    load = torch.randint(1 << 12, (experts,), generator=generator)
    check_solver(KERNELS, installed(table_of(placement, experts), ranks), [load])
