"""Kernels, copies and a decode step on one NVIDIA device.

    python benchmarks/cuda.py                 some minutes on one device
    python benchmarks/cuda.py --only copies   one part: kernels, copies or decode; nothing is kept
    python benchmarks/cuda.py --backend cpu   a trial of the program in small; nothing is kept

- kernels: `route_and_count` beside our re-write of another engine's hash-and-count kernel and
  beside plain torch code, 1 to 16,384 tokens x top-8, 256 experts, 288 slots, 32 ranks; the other
  kernels; exact shares, with their gap to the optimum.
- copies: slots from the host pool, from staging and from slots, 1 to 64 MiB each, beside one plain
  copy of as many bytes.
- decode: a step with and without an epoch of the shipped engine beside it, bfloat16 and float8, by
  the boundary path and under locks, captured in graphs and not.

Prints one table of what has to be shown, and writes benchmarks/results/cuda.json;
`python benchmarks/performance.py` shows it. Ends with 2 where there is no device.

The vendor's own bindings are a package of this file's name, and torch asks for it: whoever imports
`cuda` with this folder on the path is given that package, wherever it is, and never this script.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

NAME = "cuda"


def vendor_path() -> list[str]:
    """Where the modules of the vendor's package lie. Raises `ModuleNotFoundError`: nowhere."""
    here = Path(__file__).resolve().parent
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != here]
    found = PathFinder.find_spec(NAME, elsewhere)
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named {NAME!r}", name=NAME)
    return list(found.submodule_search_locations)


if __name__ == "__main__":
    from cuda_run import main

    sys.exit(main(described=__doc__ or ""))
elif __name__ == NAME:
    __path__ = vendor_path()
