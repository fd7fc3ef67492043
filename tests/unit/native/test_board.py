"""A board follows its own changes: as if it had been built anew on the placement that they left."""

import ctypes
import subprocess
from pathlib import Path

import pytest
from helpers.paths import ROOT

pytestmark = pytest.mark.slow

NAMES = ("planning/layer_state", "routing/routing_table")
SOURCES = [ROOT / "csrc" / f"{name}.cpp" for name in NAMES]
DRIVER = Path(__file__).with_name("board.cpp")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}")


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("board") / "board.so"
    subprocess.run(["g++", *FLAGS, *map(str, SOURCES), str(DRIVER), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize(("experts", "ranks", "per_rank"), [(5, 4, 2), (3, 3, 3), (24, 8, 4)])
def test_board_after_changes_equals_rebuilt_board(
    board: ctypes.CDLL, experts: int, ranks: int, per_rank: int
) -> None:
    astray = [board.first_astray(seed, experts, ranks, per_rank, 200) for seed in range(20)]
    assert astray == [-1] * 20
