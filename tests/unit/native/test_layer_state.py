"""A layer state follows its own changes, as if it had been built on the placement after them."""

import ctypes
import subprocess
from pathlib import Path

import pytest
from helpers.paths import ROOT

pytestmark = pytest.mark.slow

NAMES = ("planning/layer_state", "routing/routing_table")
SOURCES = [ROOT / "csrc" / f"{name}.cpp" for name in NAMES]
DRIVER = Path(__file__).with_name("layer_state_driver.cpp")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("layer_state") / "driver.so"
    subprocess.run(["g++", *FLAGS, *map(str, SOURCES), str(DRIVER), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize(("experts", "ranks", "per_rank"), [(5, 4, 2), (3, 3, 3), (24, 8, 4)])
def test_layer_state_after_changes_equals_rebuilt_state(
    driver: ctypes.CDLL, experts: int, ranks: int, per_rank: int
) -> None:
    differences = [
        driver.first_difference(seed, experts, ranks, per_rank, 200) for seed in range(20)
    ]
    assert differences == [-1] * 20
