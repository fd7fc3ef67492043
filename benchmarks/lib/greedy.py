"""The fixed greedy baseline: compiled here, with the package's own flags."""

import ctypes
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

SOURCE = Path(__file__).with_name("greedy.cpp")
FLAGS = ("-std=c++17", "-O3", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIC", "-shared")


class Baseline:
    """The compiled baseline; its file is gone when the process is."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name) / "greedy.so"
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        subprocess.run([*compiler, *FLAGS, str(SOURCE), "-o", str(library)], check=True)
        self._call = ctypes.CDLL(str(library)).plan_greedy
        self._call.restype = None

    def plan(self, load: npt.NDArray[np.int64], slots: int, ranks: int) -> npt.NDArray[np.int32]:
        """(layers, slots) for (layers, experts)."""
        layers, experts = load.shape
        placement = np.empty((layers, slots), dtype=np.int32)
        sizes = (ctypes.c_int64(n) for n in (layers, experts, slots, ranks))
        self._call(load.ctypes.data_as(ctypes.c_void_p), *sizes,
                   placement.ctypes.data_as(ctypes.c_void_p))  # fmt: skip
        return placement
