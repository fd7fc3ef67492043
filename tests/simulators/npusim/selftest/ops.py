"""The self-test of the operators: `python -m npusim -- python -m npusim.selftest.ops`.

Compares every operator of the simulated libopapi with torch on the CPU, over types and shapes, and
fails where bits differ or where an operator was not called at all.
"""

import ctypes
import sys
import time
from itertools import chain

import torch

from npusim.selftest import op_elements, op_layers, op_order, op_places, op_shapes

ASKED_FOR = {"aclnnLogSigmoid"}
"""Operators that torch_npu must find and does not call: it calls aclnnLogSigmoidForward."""
MAX_LINES = 40
"""Lines of differences that are printed."""


def main() -> int:
    """Compare, print the figures, and return the exit code."""
    began = time.perf_counter()
    torch.manual_seed(1)
    modules = (op_shapes, op_elements, op_order, op_places, op_layers)
    programs, compared = 0, 0
    wrong: list[str] = []
    for case in chain.from_iterable(module.cases() for module in modules):
        results, differences = case.differences()
        programs, compared = programs + 1, compared + results
        wrong += differences
    torch.get_device_module("npu").synchronize()
    idle = {name for name, times in operators().items() if not times}
    wrong += [f"{name} was never called" for name in sorted(idle - ASKED_FOR)]
    for line in wrong[:MAX_LINES]:
        print(line)
    print(
        f"{compared} results of {programs} programs compared, {len(operators())} operators: "
        f"{len(wrong)} wrong, {time.perf_counter() - began:.1f} s"
    )
    return 1 if wrong else 0


def operators() -> dict[str, int]:
    """Every operator of the simulator, and how often this process has called it."""
    listing = ctypes.CDLL("libopapi.so").npusim_operators
    listing.restype = ctypes.c_char_p
    pairs = (line.split() for line in listing().decode().splitlines())
    return {name: int(times) for name, times in pairs}


if __name__ == "__main__":
    sys.exit(main())
