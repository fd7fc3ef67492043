"""Commits of tables on the device: clause G2."""

import pytest
import torch
from helpers.harnesses.kernel_checks import check_commits
from helpers.strategies.hypothesis_examples import few
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from helpers.harnesses.kernel_launchers import REAL, Launchers
from helpers.harnesses.triton_interpreter import DEVICE

from equipoise.hal.kernels import Tables

KERNELS = Launchers(REAL)
Commits = list[tuple[list[int], Tensor]]


@st.composite
def commits(draw: st.DrawFn) -> tuple[Tables, Commits]:
    """Of any layers of tables of any size; what the tables say is of no matter here."""
    layers, experts, spare = draw(st.sampled_from(((1, 1, 0), (4, 5, 3), (3, 600, 600))))
    tables = Tables.empty(layers, experts, experts + spare, 1, DEVICE)
    layer_ids = st.lists(st.integers(0, layers - 1), unique=True)
    source = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    updates: Commits = []
    for numbers in draw(st.lists(layer_ids, min_size=1, max_size=4)):
        size = (len(numbers), experts + 1 + 2 * (experts + spare))
        updates.append((numbers, torch.randint(0, 1 << 30, size, generator=source).int()))
    return tables, updates


@few(12)
@given(commits())
def test_commit_tables_fills_idle_set_of_its_layers_only(
    case: tuple[Tables, Commits],
) -> None:
    check_commits(KERNELS, *case)
