"""Opens counts by step as a trace: any format of statistics, and .npy files of any size."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.encodings import read_npy_header
from equipoise.balancer.formats.files import open_file
from equipoise.balancer.formats.numbers import format_index
from equipoise.balancer.formats.routing_trace import MAX_EXPERTS, CountsTrace, Ids
from equipoise.balancer.formats.statistics import ExpertStatistics, check_layers
from equipoise.hal.arguments import INT32_MAX
from equipoise.hal.errors import FormatError, PlacementError

STEP_AXES = "step", "layer", "expert"
SCANNED_COUNTS = 1 << 16
"""Counts that are read at once to find the layers with rows."""
Value = TypeVar("Value")


def trace_of_statistics(path: Path, statistics: ExpertStatistics) -> CountsTrace:
    """Returns the windows of statistics as steps, without layers that have no rows."""
    statistics = statistics.without_empty_layers()

    def open_blocks(steps: int) -> Iterator[Ids]:
        for begin in range(0, statistics.windows, steps):
            block = statistics.counts[begin : begin + steps]
            yield checked_block(path, block, begin, statistics.layers)

    return CountsTrace(
        statistics.layers,
        statistics.experts,
        statistics.top_k,
        statistics.windows,
        statistics.source,
        open_blocks,
        statistics.recorders,
        statistics.empty_layers,
    )


def open_count_array(path: Path) -> CountsTrace:
    """Opens an .npy file (steps, layers, experts), or (layers, experts) of one step.

    Layers without rows in any step are left out, as dense ones. Blocks are read from the file as
    they are asked for, so that it may be of any size. Raises `FormatError`.
    """
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        shape, column_major, dtype = read_npy_header(path, stream, size)
        begin = stream.tell()
    if len(shape) not in (2, 3):
        axes = ", ".join(STEP_AXES)
        raise FormatError(str(path), f"array is of shape {shape}, expected axes {axes}")
    steps, layers, experts = shape if len(shape) == len(STEP_AXES) else (1, *shape)
    if 0 in shape or experts > MAX_EXPERTS:
        raise FormatError(str(path), f"array is of shape {shape}: no counts by layer and expert")
    numbers = check_or_name(path, lambda: check_layers(tuple(range(layers)), layers))
    if column_major:
        raise FormatError(str(path), "array has its columns first: save it in C order")

    def read_blocks(most_steps: int) -> Iterator[Ids]:
        with open_file(path) as stream:
            stream.seek(begin)
            for first in range(0, steps, most_steps):
                length = min(most_steps, steps - first)
                flat = np.fromfile(stream, dtype, length * layers * experts)
                if len(flat) < length * layers * experts:
                    raise FormatError(str(path), f"step {first}: the file was cut off meanwhile")
                yield checked_block(path, flat.reshape(length, layers, experts), first, numbers)

    kept = _layers_with_rows(read_blocks(max(1, SCANNED_COUNTS // (layers * experts))), layers)

    def open_blocks(most_steps: int) -> Iterator[Ids]:
        for block in read_blocks(most_steps):
            yield block if len(kept) == layers else np.ascontiguousarray(block[:, kept])

    kept_numbers = tuple(numbers[layer] for layer in kept)
    empty = tuple(sorted(set(numbers) - set(kept_numbers)))
    source = f"npy: {path}"
    return CountsTrace(kept_numbers, experts, None, steps, source, open_blocks, empty_layers=empty)


def _layers_with_rows(blocks: Iterator[Ids], layers: int) -> list[int]:
    """Places of the layers with rows, all where none has any; reads on until all are seen."""
    seen = np.zeros(layers, dtype=bool)
    for block in blocks:
        seen |= block.any(axis=(0, 2))
        if seen.all():
            break
    return np.flatnonzero(seen).tolist() if seen.any() else list(range(layers))


def checked_block(path: Path, block: npt.NDArray[Any], first: int, layers: tuple[int, ...]) -> Ids:
    """Returns (steps, layers, experts) as int32; `first` numbers the first step.

    Raises `FormatError` that names the place of what is no count.
    """
    if block.dtype.kind == "f":
        wrong = np.argwhere(~(np.floor(block) == block) | (abs(block) > INT32_MAX))
        if wrong.size:
            at = tuple(wrong[0].tolist())
            where = format_index(STEP_AXES, (first + at[0], *at[1:]), layers)
            raise FormatError(
                str(path), f"{where}: count {block[at]} is not a whole number up to {INT32_MAX}"
            )
        block = block.astype(np.int64)
    # Read as unsigned, negative counts are the largest: one pass over gigabytes finds both. A mask
    # of every count is needed only for the message.
    unsigned = block.view(block.dtype.str.replace("i", "u"))
    if int(unsigned.max()) > min(INT32_MAX, np.iinfo(block.dtype).max):
        at = tuple(np.argwhere((block < 0) | (block > INT32_MAX))[0].tolist())
        where = format_index(STEP_AXES, (first + at[0], *at[1:]), layers)
        why = "negative" if block[at] < 0 else f"more than {INT32_MAX}"
        raise FormatError(str(path), f"{where}: count {block[at]} is {why}")
    return np.ascontiguousarray(block, dtype=np.int32)


def check_or_name(path: Path, check: Callable[[], Value]) -> Value:
    """Calls `check`; adds the file to a `PlacementError`."""
    try:
        return check()
    except PlacementError as error:
        raise FormatError(str(path), str(error)) from None
