"""Every format that is known, and how a file of it is recognised."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats import (
    eplb_maps,
    equipoise_files,
    sglang_distribution,
    statistics_csv,
    trtllm_load_balancer,
    trtllm_statistics,
    vllm_ascend_expert_map,
)
from equipoise.balancer.formats.decoded_file import ARRAY, Bundle, encode_fields
from equipoise.balancer.formats.encodings import encode_npy
from equipoise.balancer.formats.files import write_bytes
from equipoise.balancer.formats.placement import Arrangement
from equipoise.balancer.formats.statistics import Statistics
from equipoise.hal.errors import RanksUnsaid


class Cargo(StrEnum):
    """What a file can carry beside counts, or beside which expert is in which slot."""

    SHARES = "shares"
    RANKS = "the number of ranks"
    LAYERS = "the numbers of layers"
    WINDOWS = "windows"
    BY_RANK = "counts by rank"
    ITERATIONS = "the numbers of iterations"
    TOP_K = "experts per token"


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        name: what `format=` takes.
        about: who writes it.
        mark: the field by which a file is recognised; none for a folder.
        reads: suffixes that it is read from.
        writes: suffixes that it is written to, first the one it is best known by.
        carries: what is kept; all else is lost.
    """

    name: str
    about: str
    mark: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    carries: frozenset[Cargo]


@dataclass(frozen=True)
class StatisticsFormat(Format):
    """One of statistics: how a bundle is read, and a path written."""

    read: Callable[[Bundle], Statistics]
    write: Callable[[Path, Statistics], None]


@dataclass(frozen=True)
class PlacementFormat(Format):
    """One of placements. `read` is told how many ranks there are, where anybody knows.

    `by_number`: who reads the file goes by the model's number of a layer, dense layers included;
    else by its place among those with experts.
    """

    read: Callable[[Bundle, int | None], Arrangement]
    write: Callable[[Path, Arrangement], None]
    by_number: bool = False


TREES = ".json", ".npz", ".safetensors"
"""Suffixes of files that hold several fields."""
TORCH = ".pt", ".pth"
FOLDER = ""
"""The suffix of a folder."""
COUNTED = frozenset({Cargo.WINDOWS, Cargo.LAYERS})
ALL_COUNTED = COUNTED | {Cargo.BY_RANK, Cargo.ITERATIONS, Cargo.TOP_K}
LAID_OUT = frozenset({Cargo.RANKS, Cargo.LAYERS})


def _told(
    read: Callable[[Bundle, int], Arrangement],
) -> Callable[[Bundle, int | None], Arrangement]:
    """For files that say how many ranks there are in a field, or not at all."""

    def told(bundle: Bundle, ranks: int | None) -> Arrangement:
        said = [bundle.whole(name) for name in ("ranks", "ep_size") if name in bundle.fields]
        if not said and ranks is None:
            what = "does not say how many ranks there are: it has to be said beside it"
            raise RanksUnsaid(str(bundle.path), what)
        if said and ranks not in (None, said[0]):
            raise bundle.error(f"is for {said[0]} ranks, not {ranks}")
        return read(bundle, said[0] if said else int(ranks or 0))

    return told


def _fields(
    pack: Callable[[Arrangement], dict[str, npt.NDArray[np.generic]]],
) -> Callable[[Path, Arrangement], None]:
    """Named arrays, as the suffix says."""
    return lambda path, value: write_bytes(path, encode_fields(path.suffix.lower(), pack(value)))


STATISTICS = (
    StatisticsFormat(
        "tensorrt-llm",
        "TensorRT-LLM, by EXPERT_STATISTIC_PATH",
        trtllm_statistics.META,
        (FOLDER,),
        (FOLDER,),
        ALL_COUNTED,
        lambda bundle: trtllm_statistics.read(bundle.path),
        trtllm_statistics.write,
    ),
    StatisticsFormat(
        "sglang",
        "SGLang's expert distribution recorder",
        sglang_distribution.COUNT,
        (*TREES, *TORCH),
        (".json",),
        COUNTED,
        sglang_distribution.unpack,
        lambda path, value: write_bytes(
            path, encode_fields(".json", sglang_distribution.pack(value))
        ),
    ),
    StatisticsFormat(
        "sglang-records",
        "SGLang's recorder in the modes per_pass and per_token",
        sglang_distribution.RECORDS,
        TORCH,
        (),
        frozenset(),
        sglang_distribution.refuse_records,
        lambda path, value: None,
    ),
    StatisticsFormat(
        "npz",
        "Equipoise",
        equipoise_files.COUNT,
        TREES,
        (".npz",),
        ALL_COUNTED,
        equipoise_files.unpack_statistics,
        lambda path, value: write_bytes(
            path, encode_fields(".npz", equipoise_files.pack_statistics(value))
        ),
    ),
    StatisticsFormat(
        "npy",
        "anyone, by numpy.save",
        ARRAY,
        (".npy",),
        (".npy",),
        frozenset({Cargo.WINDOWS}),
        equipoise_files.unpack_array,
        lambda path, value: write_bytes(path, encode_npy(value.counts)),
    ),
    StatisticsFormat(
        "csv",
        "anyone",
        statistics_csv.COUNT,
        (".csv",),
        (".csv",),
        COUNTED | {Cargo.ITERATIONS},
        lambda bundle: statistics_csv.unpack(bundle.path, bundle.fields),
        lambda path, value: write_bytes(path, statistics_csv.encode_csv(value)),
    ),
)
PLACEMENTS = (
    PlacementFormat(
        "equipoise",
        "Equipoise",
        equipoise_files.FORMAT,
        (".json",),
        (".json",),
        LAID_OUT | {Cargo.SHARES},
        _told(equipoise_files.unpack_placement),
        lambda path, value: write_bytes(path, equipoise_files.pack_placement(value)),
        by_number=True,
    ),
    PlacementFormat(
        "tensorrt-llm",
        "TensorRT-LLM's tools, moe_load_balancer.yaml",
        trtllm_load_balancer.ASSIGNMENTS,
        (".yaml", ".yml"),
        (".yaml", ".yml"),
        frozenset({Cargo.LAYERS}),
        _told(trtllm_load_balancer.unpack),
        lambda path, value: write_bytes(path, trtllm_load_balancer.pack(value)),
        by_number=True,
    ),
    PlacementFormat(
        "vllm",
        "Equipoise, with the maps of vLLM's EPLB state",
        eplb_maps.FORWARD,
        (*TREES, *TORCH),
        (".npz", ".safetensors", ".json"),
        LAID_OUT,
        _told(eplb_maps.unpack_maps),
        _fields(eplb_maps.pack_maps),
    ),
    PlacementFormat(
        "sglang",
        "SGLang's --init-expert-location",
        eplb_maps.FORWARD,
        (*TREES, *TORCH),
        (".json",),
        frozenset({Cargo.LAYERS}),
        _told(eplb_maps.unpack_maps),
        _fields(eplb_maps.pack_forward),
        by_number=True,
    ),
    PlacementFormat(
        "vllm-ascend",
        "vllm-ascend, expert_map_path and expert_map_record_path",
        vllm_ascend_expert_map.LAYERS,
        (".json",),
        (".json",),
        LAID_OUT,
        vllm_ascend_expert_map.unpack,
        lambda path, value: write_bytes(path, vllm_ascend_expert_map.pack(value)),
    ),
    PlacementFormat(
        "eplb-table",
        "Equipoise, with the table of Ascend's npu_moe_update_expert",
        eplb_maps.EPLB_TABLE,
        (*TREES, *TORCH),
        (".npz", ".safetensors", ".json"),
        LAID_OUT,
        _told(eplb_maps.unpack_table),
        _fields(eplb_maps.pack_table),
    ),
    PlacementFormat(
        "npy",
        "anyone, by numpy.save",
        ARRAY,
        (".npy",),
        (".npy",),
        frozenset(),
        _told(eplb_maps.unpack_array),
        lambda path, value: write_bytes(path, encode_npy(value.placement)),
    ),
)
"""The first that is written to a suffix is what the suffix alone means."""
