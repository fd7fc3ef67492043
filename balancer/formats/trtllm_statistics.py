"""Reads and writes the folder of statistics that TensorRT-LLM records by `EXPERT_STATISTIC_PATH`.

`meta_info.json` has `num_experts` (the number of slots, if it balanced while recording) and
`num_experts_per_token`; `rank0.safetensors` and so on hold int64 (num_experts,) by
`ITERATION_LAYER`: the rows of that rank. Iterations are contiguous, and every layer has all of
    them.
"""

import re
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.decoded_file import DecodedFile, decode_file
from equipoise.balancer.formats.encodings import encode_json, encode_safetensors
from equipoise.balancer.formats.files import list_folder, write_folder
from equipoise.balancer.formats.numbers import short_repr
from equipoise.balancer.formats.statistics import Counts, ExpertStatistics
from equipoise.hal.errors import FormatError

META_FILE = "meta_info.json"
EXPERTS_KEY = "num_experts"
TOP_K_KEY = "num_experts_per_token"
RANK_FILE = re.compile(r"rank(0|[1-9][0-9]{0,5})\.safetensors")
COUNTS_KEY = re.compile(r"(0|[1-9][0-9]{0,11})_(0|[1-9][0-9]{0,4})")
IterationGrid = tuple[list[int], list[int]]
"""Iterations and layers."""


def read_statistics_folder(folder: Path) -> ExpertStatistics:
    """Reads counts by rank and their sum. Raises `FormatError` that names the file."""
    if META_FILE not in list_folder(folder):
        raise FormatError(
            str(folder), f"is a folder without {META_FILE}: a folder has to be TensorRT-LLM's"
        )
    meta = decode_file(folder / META_FILE)
    experts = meta.integer(EXPERTS_KEY)
    files = [decode_file(folder / name) for name in _rank_files(folder)]
    first: IterationGrid | None = None
    tables = []
    for file in files:
        grid = _iteration_grid(file)
        if first is not None and grid != first:
            raise file.error("has other iterations or layers than rank0.safetensors")
        first = grid
        tables.append(_counts_of_rank(file, grid, experts))
    iterations, layers = first or ([], [])
    by_rank = np.stack(tables)
    return ExpertStatistics(
        by_rank.sum(axis=0), tuple(layers), by_rank, iterations[0], meta.optional_integer(TOP_K_KEY)
    )


def write_statistics_folder(folder: Path, statistics: ExpertStatistics) -> None:
    """Writes all files or none. If counts by rank are unknown, rank 0 gets all rows."""
    by_rank = statistics.by_rank if statistics.by_rank is not None else statistics.counts[None]
    files = {META_FILE: encode_meta(statistics.experts, statistics.top_k)}
    for rank, windows in enumerate(by_rank):
        files[rank_file(rank)] = encode_rank(
            windows, statistics.layers, statistics.first_iteration or 0
        )
    write_folder(folder, files)


def rank_file(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank{rank}.safetensors"


def encode_meta(experts: int, top_k: int | None) -> bytes:
    """Encodes `meta_info.json`."""
    return encode_json({EXPERTS_KEY: experts, TOP_K_KEY: top_k})


def encode_rank(counts: Counts, layers: tuple[int, ...], first: int) -> bytes:
    """Encodes a rank's (iterations, layers, experts); `first` numbers the first iteration."""
    return encode_safetensors(
        {
            f"{iteration}_{layer}": row
            for iteration, rows in enumerate(counts, first)
            for layer, row in zip(layers, rows, strict=True)
        }
    )


def _rank_files(folder: Path) -> list[str]:
    """Returns the files in order of ranks; ignores others in the folder, such as raw ids."""
    ranks = sorted(
        int(match[1]) for name in list_folder(folder) if (match := RANK_FILE.fullmatch(name))
    )
    if not ranks:
        raise FormatError(str(folder), "has no rank0.safetensors")
    missing = sorted(set(range(len(ranks))) - set(ranks))
    if missing:
        raise FormatError(str(folder), f"has no rank{missing[0]}.safetensors, but rank{ranks[-1]}")
    return [rank_file(rank) for rank in ranks]


def _iteration_grid(file: DecodedFile) -> IterationGrid:
    """Returns the iterations and layers of a file. Raises `FormatError` if one is missing."""
    keys = {_key(file, name) for name in file.fields}
    iterations, layers = (sorted({key[axis] for key in keys}) for axis in (0, 1))
    if not keys:
        raise file.error("has no counts")
    for before, after in pairwise(iterations):
        if after != before + 1:
            raise file.error(f"has iterations {before} and {after}, and none between")
    for iteration, layer in product(iterations, layers):
        if (iteration, layer) not in keys:
            raise file.error(f"layer {layer} has no counts of iteration {iteration}")
    return iterations, layers


def _key(file: DecodedFile, name: str) -> tuple[int, int]:
    match = COUNTS_KEY.fullmatch(name)
    if match is None:
        raise file.error(f"field {short_repr(name)} is not ITERATION_LAYER")
    return int(match[1]), int(match[2])


def _counts_of_rank(file: DecodedFile, grid: IterationGrid, experts: int) -> Counts:
    """Returns the counts of a rank, int64 (iterations, layers, experts)."""
    iterations, layers = grid
    rows: list[npt.NDArray[np.int64]] = []
    for iteration in iterations:
        for layer in layers:
            row = file.int64_array(f"{iteration}_{layer}", ("expert",))
            if row.size != experts:
                problem = f"layer {layer} has {row.size} counts in iteration {iteration}"
                raise file.error(f"{problem}, {META_FILE} says {experts} experts")
            rows.append(row)
    return np.array(rows, dtype=np.int64).reshape(len(iterations), len(layers), experts)
