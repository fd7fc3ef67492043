"""Lists the known formats: how a file is recognised, read and written, and what it can carry."""

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
from equipoise.balancer.formats.decoded_file import UNNAMED_ARRAY, DecodedFile, encode_fields
from equipoise.balancer.formats.encodings import encode_npy
from equipoise.balancer.formats.files import write_bytes
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.statistics import ExpertStatistics
from equipoise.hal.errors import RankCountMissing


class FileContent(StrEnum):
    """What a file can carry in addition to counts, or to experts by slot."""

    SHARES = "shares"
    RANKS = "the number of ranks"
    LAYERS = "the numbers of layers"
    WINDOWS = "windows"
    BY_RANK = "counts by rank"
    ITERATIONS = "the numbers of iterations"
    TOP_K = "experts per token"


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        name: value of the argument `format=`.
        written_by: the system that writes it, for listings.
        key_field: the field, or file in a folder, by which it is recognised.
        read_suffixes: suffixes that it is read from.
        write_suffixes: suffixes that it is written to, the most common first; none if read only.
        carries: what it keeps; anything else is lost.
    """

    name: str
    written_by: str
    key_field: str
    read_suffixes: tuple[str, ...]
    write_suffixes: tuple[str, ...]
    carries: frozenset[FileContent]


@dataclass(frozen=True)
class StatisticsFormat(Format):
    """A format of statistics, with its reader and writer."""

    read: Callable[[DecodedFile], ExpertStatistics]
    write: Callable[[Path, ExpertStatistics], None]


@dataclass(frozen=True)
class PlacementFormat(Format):
    """A format of placements, with its reader and writer.

    `read` takes the number of ranks, or None if the caller does not know it.

    Attributes:
        by_layer_number: readers of the file identify a layer by its number in the model, dense
            layers counted; otherwise by its position among the layers with experts.
    """

    read: Callable[[DecodedFile, int | None], ExpertPlacement]
    write: Callable[[Path, ExpertPlacement], None]
    by_layer_number: bool = False


FIELD_SUFFIXES = ".json", ".npz", ".safetensors"
"""Suffixes of encodings that hold several named fields."""
TORCH_SUFFIXES = ".pt", ".pth"
FOLDER_SUFFIX = ""
"""The suffix of a folder."""
COUNTS_CONTENT = frozenset({FileContent.WINDOWS, FileContent.LAYERS})
ALL_COUNTS_CONTENT = COUNTS_CONTENT | {
    FileContent.BY_RANK,
    FileContent.ITERATIONS,
    FileContent.TOP_K,
}
PLACEMENT_CONTENT = frozenset({FileContent.RANKS, FileContent.LAYERS})


def _with_rank_count(
    read: Callable[[DecodedFile, int], ExpertPlacement],
) -> Callable[[DecodedFile, int | None], ExpertPlacement]:
    """Wraps a reader of files that may have the number of ranks in a field.

    Raises `RankCountMissing` if neither the file nor the caller has it.
    """

    def read_with_ranks(file: DecodedFile, ranks: int | None) -> ExpertPlacement:
        stored = [file.integer(name) for name in ("ranks", "ep_size") if name in file.fields]
        if not stored and ranks is None:
            problem = "does not say how many ranks there are: it has to be said beside it"
            raise RankCountMissing(str(file.path), problem)
        if stored and ranks not in (None, stored[0]):
            raise file.error(f"is for {stored[0]} ranks, not {ranks}")
        return read(file, stored[0] if stored else int(ranks or 0))

    return read_with_ranks


def _write_fields(
    pack: Callable[[ExpertPlacement], dict[str, npt.NDArray[np.generic]]],
) -> Callable[[Path, ExpertPlacement], None]:
    """Returns a writer of named arrays, in the encoding of the suffix."""
    return lambda path, value: write_bytes(path, encode_fields(path.suffix.lower(), pack(value)))


STATISTICS_FORMATS = (
    StatisticsFormat(
        "tensorrt-llm",
        "TensorRT-LLM, by EXPERT_STATISTIC_PATH",
        trtllm_statistics.META_FILE,
        (FOLDER_SUFFIX,),
        (FOLDER_SUFFIX,),
        ALL_COUNTS_CONTENT,
        lambda file: trtllm_statistics.read_statistics_folder(file.path),
        trtllm_statistics.write_statistics_folder,
    ),
    StatisticsFormat(
        "sglang",
        "SGLang's expert distribution recorder",
        sglang_distribution.LOGICAL_COUNT,
        (*FIELD_SUFFIXES, *TORCH_SUFFIXES),
        (".json",),
        COUNTS_CONTENT,
        sglang_distribution.unpack,
        lambda path, value: write_bytes(
            path, encode_fields(".json", sglang_distribution.pack(value))
        ),
    ),
    StatisticsFormat(
        "sglang-records",
        "SGLang's recorder in the modes per_pass and per_token",
        sglang_distribution.RECORDS,
        TORCH_SUFFIXES,
        (),
        frozenset(),
        sglang_distribution.refuse_records,
        lambda path, value: None,
    ),
    StatisticsFormat(
        "npz",
        "Equipoise",
        equipoise_files.COUNTS_FIELD,
        FIELD_SUFFIXES,
        (".npz",),
        ALL_COUNTS_CONTENT,
        equipoise_files.unpack_statistics,
        lambda path, value: write_bytes(
            path, encode_fields(".npz", equipoise_files.pack_statistics(value))
        ),
    ),
    StatisticsFormat(
        "npy",
        "anyone, by numpy.save",
        UNNAMED_ARRAY,
        (".npy",),
        (".npy",),
        frozenset({FileContent.WINDOWS}),
        equipoise_files.unpack_counts,
        lambda path, value: write_bytes(path, encode_npy(value.counts)),
    ),
    StatisticsFormat(
        "csv",
        "anyone",
        statistics_csv.COUNT,
        (".csv",),
        (".csv",),
        COUNTS_CONTENT | {FileContent.ITERATIONS},
        lambda file: statistics_csv.unpack(file.path, file.fields),
        lambda path, value: write_bytes(path, statistics_csv.encode_csv(value)),
    ),
)
PLACEMENT_FORMATS = (
    PlacementFormat(
        "equipoise",
        "Equipoise",
        equipoise_files.FORMAT_FIELD,
        (".json",),
        (".json",),
        PLACEMENT_CONTENT | {FileContent.SHARES},
        _with_rank_count(equipoise_files.unpack_placement),
        lambda path, value: write_bytes(path, equipoise_files.pack_placement(value)),
        by_layer_number=True,
    ),
    PlacementFormat(
        "tensorrt-llm",
        "TensorRT-LLM's tools, moe_load_balancer.yaml",
        trtllm_load_balancer.ASSIGNMENTS,
        (".yaml", ".yml"),
        (".yaml", ".yml"),
        frozenset({FileContent.LAYERS}),
        _with_rank_count(trtllm_load_balancer.unpack),
        lambda path, value: write_bytes(path, trtllm_load_balancer.pack(value)),
        by_layer_number=True,
    ),
    PlacementFormat(
        "vllm",
        "Equipoise, with the maps of vLLM's EPLB state",
        eplb_maps.PHYSICAL_TO_LOGICAL,
        (*FIELD_SUFFIXES, *TORCH_SUFFIXES),
        (".npz", ".safetensors", ".json"),
        PLACEMENT_CONTENT,
        _with_rank_count(eplb_maps.unpack_maps),
        _write_fields(eplb_maps.pack_maps),
    ),
    PlacementFormat(
        "sglang",
        "SGLang's --init-expert-location",
        eplb_maps.PHYSICAL_TO_LOGICAL,
        (*FIELD_SUFFIXES, *TORCH_SUFFIXES),
        (".json",),
        frozenset({FileContent.LAYERS}),
        _with_rank_count(eplb_maps.unpack_maps),
        _write_fields(eplb_maps.pack_physical_to_logical),
        by_layer_number=True,
    ),
    PlacementFormat(
        "vllm-ascend",
        "vllm-ascend, expert_map_path and expert_map_record_path",
        vllm_ascend_expert_map.LAYER_LIST,
        (".json",),
        (".json",),
        PLACEMENT_CONTENT,
        vllm_ascend_expert_map.unpack,
        lambda path, value: write_bytes(path, vllm_ascend_expert_map.pack(value)),
    ),
    PlacementFormat(
        "eplb-table",
        "Equipoise, with the table of Ascend's npu_moe_update_expert",
        eplb_maps.EPLB_TABLE,
        (*FIELD_SUFFIXES, *TORCH_SUFFIXES),
        (".npz", ".safetensors", ".json"),
        PLACEMENT_CONTENT,
        _with_rank_count(eplb_maps.unpack_table),
        _write_fields(eplb_maps.pack_table),
    ),
    PlacementFormat(
        "npy",
        "anyone, by numpy.save",
        UNNAMED_ARRAY,
        (".npy",),
        (".npy",),
        frozenset(),
        _with_rank_count(eplb_maps.unpack_slot_array),
        lambda path, value: write_bytes(path, encode_npy(value.placement)),
    ),
)
"""In order of preference: of the formats written to a suffix, the first is its default."""
