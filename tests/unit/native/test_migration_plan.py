"""The native migration plan: the same however it was compiled, and rounds beyond one word."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT
from numpy.typing import NDArray

from equipoise import _native

DRIVER = Path(__file__).with_name("migration_plan_driver.cpp")
NAMES = (
    "migration/migration_plan",
    "migration/layer_chunks",
    "migration/installed_slots",
    "migration/source_choice",
    "migration/sender_balance",
    "migration/edge_colouring",
    "routing/routing_table",
)
COMPILERS = (("g++", "-O0"), ("g++", "-O2", "-march=native"), ("clang++", "-O3"))
LAYERS, EXPERTS, SLOTS, RANKS, NODES = 24, 40, 64, 16, 2
STAGING, SLOTS_PER_MESSAGE = 40, 2
Ids = NDArray[np.int32]
Answer = tuple[list[list[int]], int]
"""Layer, slot, source, round and buffer of every move; rounds of all lots."""


def plan(seed: int) -> Ids:
    """Every expert has a slot in each layer; the rest are drawn."""
    rng = np.random.default_rng(seed)
    rows = [[*range(EXPERTS), *rng.integers(EXPERTS, size=SLOTS - EXPERTS)] for _ in range(LAYERS)]
    return rng.permuted(np.array(rows, dtype=np.int32), axis=1)


def native_plan(
    before: Ids, after: Ids, order: Ids, staging: int, slots_per_message: int
) -> Answer:
    rows, *_, rounds = _native.plan_migration(
        before, after, order, EXPERTS, RANKS, NODES, staging, slots_per_message
    )
    layer, slot, _, source, buffer, number = rows.reshape(6, -1)
    moves: list[list[int]] = np.stack([layer, slot, source, number, buffer], axis=1).tolist()
    return moves, int(rounds.sum())


def compiled_plan(
    compiler: tuple[str, ...], folder: Path, before: Ids, after: Ids, order: Ids
) -> Answer:
    """The same by a library that is compiled with that compiler and those options."""
    sources = [str(ROOT / "csrc" / f"{name}.cpp") for name in NAMES]
    library = folder / f"{'_'.join(compiler)}.so"
    common = ("-std=c++17", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}")
    subprocess.run([*compiler, *common, *sources, str(DRIVER), "-o", str(library)], check=True)
    call = ctypes.CDLL(str(library)).plan_migration
    call.restype = ctypes.c_int32
    sizes = [LAYERS, EXPERTS, SLOTS, RANKS, NODES, STAGING, SLOTS_PER_MESSAGE]
    out = np.zeros((np.count_nonzero(before != after), 5), dtype=np.int32)
    arguments = before, after, order, np.array(sizes, dtype=np.int32), out
    rounds = call(*(array.ctypes.data_as(ctypes.c_void_p) for array in arguments))
    return out.tolist(), rounds


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_migration_plan_is_independent_of_compiler_flags(tmp_path: Path) -> None:
    compilers = [compiler for compiler in COMPILERS if shutil.which(compiler[0])]
    assert len(compilers) >= 2
    arguments = plan(1), plan(2), np.arange(LAYERS, dtype=np.int32)[::-1].copy()
    expected = native_plan(*arguments, STAGING, SLOTS_PER_MESSAGE)
    assert [compiled_plan(compiler, tmp_path, *arguments) for compiler in compilers] == [
        expected
    ] * len(compilers)


@pytest.mark.parametrize("layers", range(14, LAYERS + 1))
def test_migration_plan_uses_fewest_rounds(layers: int) -> None:
    """One chunk of more rounds than a word has bits, and of fewer."""
    before, after = plan(3), plan(4)
    after[layers:] = before[layers:]
    moves, rounds = native_plan(
        before, after, np.arange(layers, dtype=np.int32), 2 * SLOTS * LAYERS, 1
    )
    per_rank = SLOTS // RANKS
    far = np.array([m for m in moves if m[3] >= 0])
    sender, receiver, number = far[:, 2] // per_rank, far[:, 1] // per_rank, far[:, 3]
    assert rounds == max(np.bincount(sender).max(), np.bincount(receiver).max())
    for end in (sender, receiver):
        assert len(set(zip(end.tolist(), number.tolist(), strict=True))) == len(far)
    assert set(number.tolist()) == set(range(rounds))
