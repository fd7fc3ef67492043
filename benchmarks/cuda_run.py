"""The parts of `cuda.py`, one after the other."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import cuda_copies
import cuda_decode
import cuda_kernels
import cuda_page
import cuda_vllm
from cuda_place import Place, facts, missing, opened
from evidence import save

BACKEND = "cuda"
NO_DEVICE = 2
Figures = dict[str, Any]
Part = Callable[[Place], Figures]
PARTS: dict[str, tuple[Part, Part]] = {
    "kernels": (
        lambda place: cuda_kernels.measured(place, cuda_kernels.FULL),
        lambda place: cuda_kernels.measured(place, cuda_kernels.TRIAL),
    ),
    "vllm": (
        lambda place: cuda_vllm.checked(place, cuda_kernels.FULL),
        lambda place: cuda_vllm.checked(place, cuda_kernels.TRIAL),
    ),
    "copies": (
        lambda place: cuda_copies.measured(place, cuda_copies.FULL),
        lambda place: cuda_copies.measured(place, cuda_copies.TRIAL),
    ),
    "decode": (
        lambda place: cuda_decode.measured(place, cuda_decode.FULL),
        lambda place: cuda_decode.measured(place, cuda_decode.TRIAL),
    ),
}
"""In this order: in full, and as a trial."""


def options(arguments: Sequence[str] | None, described: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=described, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--backend", default=BACKEND, help="any but cuda is tried in small, and nothing is kept"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, described: str = "") -> int:
    """Measure, print and keep; 2 where there is no device. `described` is for who asks for help."""
    chosen = options(arguments, described)
    if why := missing(chosen.backend):
        sys.stderr.write(f"cuda.py cannot run here: {why}\n")
        return NO_DEVICE
    figures = measured(chosen)
    if chosen.backend != BACKEND:
        told = [f"A trial of the program on {chosen.backend}, in small; nothing is kept."]
        sys.stdout.write("\n".join([*told, *cuda_page.tried(figures)]) + "\n")
        return 0
    table = cuda_page.table({"cuda": figures, "cuda_deep": None})
    sys.stdout.write("\n".join(table) + "\n")
    if chosen.only == list(PARTS):
        save("cuda", ["python", "benchmarks/cuda.py"], figures)
    return 0


def measured(chosen: argparse.Namespace) -> Figures:
    """All parts that were chosen."""
    trial, began = chosen.backend != BACKEND, time.monotonic()
    with opened(chosen.backend) as place:
        figures: Figures = {"device": facts(place)}
        for name, part in PARTS.items():
            if name in chosen.only:
                sys.stderr.write(f"{name}, {time.monotonic() - began:.0f} s\n")
                figures[name] = part[trial](place)
    return {**figures, "seconds": round(time.monotonic() - began)}
