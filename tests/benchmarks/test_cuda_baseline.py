"""The rival kernels of `benchmarks/gpu` equal the rule that they are written from."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.harnesses.triton_interpreter import DEVICE, interpret_without_device
from helpers.strategies.hypothesis_examples import few
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.routing import build_table
from equipoise.hal.routing_rules import RowHash, route_by_row_hash

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.deep
BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def imported() -> Any:
    """`gpu.baseline`; the folder of benchmarks is no package."""
    interpret_without_device()
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return import_module("gpu.baseline")
    finally:
        sys.path.remove(str(BENCHMARKS))


BASELINE = imported()
BOTH = ("hash_and_count", "torch_hash_and_count")


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int, int]:
    """Slots of each expert, ids, elements a row, rows that are counted."""
    copies = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    slots = draw(st.permutations(range(sum(copies))))
    runs = [slots[sum(copies[:e]) : sum(copies[: e + 1])] for e in range(len(copies))]
    ids = draw(st.lists(st.integers(-2, len(copies) + 1), max_size=300))
    return runs, ids, draw(st.integers(1, 9)), draw(st.integers(0, 60))


@pytest.mark.parametrize("name", BOTH)
@few(30)
@given(cases())
def test_baseline_kernel_equals_rule_in_its_own_layout(
    name: str, case: tuple[list[list[int]], list[int], int, int]
) -> None:
    runs, ids, top_k, rows = case
    most, slots = max(map(len, runs)), sum(map(len, runs))
    replicas = torch.tensor([[*run, *[-1] * (most - len(run))] for run in runs]).int()
    due = [-1] * len(ids)
    load = [7] * slots
    for place, expert in enumerate(ids):
        if 0 <= expert < len(runs):
            turn = place // top_k * 2654435769 % 2**32
            due[place] = runs[expert][turn % len(runs[expert])]
            load[due[place]] += place // top_k < rows
    found = torch.full((len(ids),), -9, dtype=torch.int32, device=DEVICE)
    loads = torch.full((slots,), 7, dtype=torch.int32, device=DEVICE)
    getattr(BASELINE, name)(
        torch.tensor(ids, dtype=torch.int32).to(DEVICE),
        replicas.to(DEVICE),
        torch.tensor([len(run) for run in runs], dtype=torch.int32).to(DEVICE),
        loads,
        torch.tensor([rows], dtype=torch.int32).to(DEVICE),
        top_k,
        found,
    )
    assert found.tolist() == due
    assert loads.tolist() == load


@pytest.mark.parametrize("name", BOTH)
def test_baseline_kernel_chooses_as_contract_rule(name: str) -> None:
    placement = torch.tensor([0, 1, 0, 2, 0, 2], dtype=torch.int32)
    shares = torch.tensor([65536, 65536, 0, 65536, 0, 0], dtype=torch.int32)
    table = build_table(placement, shares, 3)
    ids = torch.arange(64, dtype=torch.int32) % 3
    rows = torch.tensor([64], dtype=torch.int32)
    due, _ = route_by_row_hash(ids, table, RowHash(2, rows))
    found, load = torch.empty_like(ids).to(DEVICE), torch.zeros(6, dtype=torch.int32).to(DEVICE)
    replicas = torch.tensor([[0, 2, 4], [1, -1, -1], [3, 5, -1]], dtype=torch.int32)
    copies = torch.tensor([3, 1, 2], dtype=torch.int32)
    getattr(BASELINE, name)(
        ids.to(DEVICE), replicas.to(DEVICE), copies.to(DEVICE), load, rows.to(DEVICE), 2, found
    )
    assert found.tolist() == due.tolist()
    assert load.tolist() == torch.bincount(due, minlength=6).tolist()
