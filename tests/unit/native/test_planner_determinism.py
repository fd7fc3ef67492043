"""The planner gives the same bits however it was compiled: ranks of unlike machines must agree."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT
from numpy.typing import NDArray

from equipoise import _native

DRIVER = Path(__file__).with_name("planner_driver.cpp")
BOUND = "bindings"
"""Folder of the sources that need Python."""
COMMON = ("-std=c++17", "-fPIC", "-shared", "-pthread", f"-I{ROOT / 'csrc'}")
COMPILERS = (
    ("g++", "-O0"),
    ("g++", "-O2", "-march=native", "-ffast-math"),
    ("clang++", "-O3"),
)
"""Flags that would show, if a rounding or an order of evaluation took part."""
SIZES = 12, 64, 80, 16
SHARE_ONE = 65536
Build = Callable[..., list[int]]


def compiled_planner(compiler: tuple[str, ...], folder: Path) -> Build:
    """The planner, compiled with that compiler and those options."""
    sources = [p for p in (ROOT / "csrc").rglob("*.cpp") if p.parent.name != BOUND]
    library = folder / f"{'_'.join(compiler).replace('/', '')}.so"
    subprocess.run(
        [*compiler, *COMMON, *map(str, sources), str(DRIVER), "-o", str(library)], check=True
    )
    call = ctypes.CDLL(str(library)).plan
    call.restype = None

    def plan(load: NDArray[np.int64], installed: NDArray[np.int32] | None, policy: int,
             aims: NDArray[np.int32], windows: NDArray[np.int64]) -> list[int]:  # fmt: skip
        layers, experts, slots, ranks = SIZES
        out = np.zeros((2, layers, slots), dtype=np.int32)
        before = None if installed is None else pointer(installed)
        call(pointer(load), ctypes.c_int64(layers), experts, slots, ranks, before, policy,
             pointer(aims), pointer(windows), ctypes.c_int64(len(windows)),
             pointer(out[0]), pointer(out[1]))  # fmt: skip
        numbers: list[int] = out.ravel().tolist()
        return numbers

    return plan


def pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def native_plan(load: NDArray[np.int64], installed: NDArray[np.int32] | None, policy: int,
            aims: NDArray[np.int32], windows: NDArray[np.int64]) -> list[int]:  # fmt: skip
    layers, _, slots, ranks = SIZES
    capacity = np.full(ranks, SHARE_ONE, dtype=np.int32)
    allowance = np.full(layers, 2**31, dtype=np.int64)
    placement, shares, _, _ = _native.plan(load, windows, slots, capacity, 1, 0, installed, policy,
                                           aims, allowance, 2**31 - 1, 1)  # fmt: skip
    return [*placement.ravel().tolist(), *shares.ravel().tolist()]


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_planner_bits_are_independent_of_compiler_flags(tmp_path: Path) -> None:
    compilers = [compiler for compiler in COMPILERS if shutil.which(compiler[0])]
    assert len(compilers) >= 2
    with ThreadPoolExecutor(2) as pool:
        builds = list(pool.map(lambda compiler: compiled_planner(compiler, tmp_path), compilers))
    layers, experts, *_ = SIZES
    rng = np.random.default_rng(7)
    odds = np.exp(rng.standard_normal((2, layers, experts)))
    before, *windows = rng.poisson(1000 * odds[[0, 1, 1, 0, 1]]).astype(np.int64)
    later = np.stack(windows)
    none = np.array([0, 0, 0, SHARE_ONE, SHARE_ONE, 0], dtype=np.int32)
    first = native_plan(before, None, 1, none, before[None])
    installed = np.array(first[: len(first) // 2], dtype=np.int32).reshape(layers, -1)
    for policy in range(3):
        for split in range(2):
            aims = np.array([1311, 6554, 78643, SHARE_ONE, SHARE_ONE, split], dtype=np.int32)
            arguments = later.sum(axis=0), installed, policy, aims, later
            expected = native_plan(*arguments)
            assert [build(*arguments) for build in builds] == [expected] * len(builds)
