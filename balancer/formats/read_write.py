"""Reads and writes files: finds the format, checks the values, reports what a format loses."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from equipoise.balancer.formats.decoded_file import DecodedFile, decode_file
from equipoise.balancer.formats.eplb_maps import PHYSICAL_TO_LOGICAL
from equipoise.balancer.formats.files import is_folder
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.registry import (
    FOLDER_SUFFIX,
    PLACEMENT_FORMATS,
    STATISTICS_FORMATS,
    FileContent,
    Format,
    PlacementFormat,
    StatisticsFormat,
)
from equipoise.balancer.formats.statistics import ExpertStatistics, LayerNumbering
from equipoise.hal.arguments import check_type, whole_number
from equipoise.hal.errors import FormatError, PlacementError

FilePath = str | os.PathLike[str]
Kind = TypeVar("Kind", bound=Format)
Value = TypeVar("Value")
UNKNOWN_NUMBERS = "the model's numbers of layers, which the source does not tell"
NUMBERS_OPTIONAL = frozenset({"equipoise", "npz", "npy"})
"""Formats whose files leave out numbers of layers that are unknown."""


def known_formats() -> tuple[Format, ...]:
    """Returns all formats, those of statistics first."""
    return *STATISTICS_FORMATS, *PLACEMENT_FORMATS


def read_statistics(path: FilePath) -> ExpertStatistics:
    """Reads statistics from a file or folder; the format is found by suffix and content.

    Args:
        path: in any of the formats of docs/formats.md: TensorRT-LLM's, SGLang's, CSV, ...

    Raises:
        FormatError: the file cannot be read; one line that names file, layer and value.
    """
    file = _open(Path(path))
    return _statistics(file, _find_format(file, STATISTICS_FORMATS, "statistics"))


def read_placement(path: FilePath, *, ranks: int | None = None) -> ExpertPlacement:
    """Reads a placement from a file; the format is found by suffix and content.

    Shares are even where the file has none.

    Args:
        path: in any of the formats of docs/formats.md: TensorRT-LLM's, vLLM's, SGLang's,
            vllm-ascend's, NumPy's, ours.
        ranks: needed where the file does not say it; must agree where it does.

    Raises:
        FormatError: the file cannot be read; one line that names file, layer and value.
        RankCountMissing: neither the file nor `ranks` says how many ranks there are.
        PlacementError: `ranks` is not a whole number.
    """
    if ranks is not None:
        ranks = whole_number("ranks", ranks, PlacementError)
    file = _open(Path(path))
    return _placement(file, _find_format(file, PLACEMENT_FORMATS, "a placement"), ranks)


def read_either(path: FilePath, *, ranks: int | None = None) -> ExpertStatistics | ExpertPlacement:
    """Reads statistics or a placement; the format is found by suffix and content.

    With `ranks` the file is read as a placement: an unnamed array may be either, and only a
    placement has ranks. Raises `FormatError`, in one line that names file, layer and value.
    """
    file = _open(Path(path))
    if ranks is not None:
        return _placement(file, _find_format(file, PLACEMENT_FORMATS, "a placement"), ranks)
    formats: tuple[StatisticsFormat | PlacementFormat, ...] = (
        *STATISTICS_FORMATS,
        *PLACEMENT_FORMATS,
    )
    file_format = _find_format(file, formats, "statistics or a placement")
    if isinstance(file_format, StatisticsFormat):
        return _statistics(file, file_format)
    return _placement(file, file_format, None)


def write_statistics(
    path: FilePath, statistics: ExpertStatistics, format: str | None = None
) -> str | None:
    """Write a file, or a folder, whole or not at all.

    Args:
        path: what is there is replaced.
        statistics: what to write.
        format: a name of docs/formats.md; None for the one of the path's suffix.

    Returns:
        What the format loses, in words, or None.

    Raises:
        FormatError: no such format, or the system did not take the file.
        PlacementError: `statistics` is something else.
    """
    check_type("statistics", statistics, ExpertStatistics, PlacementError)
    file_format = _choose_format(Path(path), STATISTICS_FORMATS, format)
    file_format.write(Path(path), statistics)
    loss = _loss(file_format, _statistics_content(statistics))
    warnings = (
        _rank_warning(file_format, statistics),
        _unknown_numbers_warning(file_format, statistics),
    )
    return "; ".join(filter(None, (loss, *warnings))) or None


def write_placement(
    path: FilePath, placement: ExpertPlacement, format: str | None = None
) -> str | None:
    """Write a file whole or not at all.

    Args:
        path: what is there is replaced.
        placement: what to write.
        format: a name of docs/formats.md; None for the one of the path's suffix.

    Returns:
        What the format loses, in words, or None. Even shares are nothing to lose.

    Raises:
        FormatError: no such format, or the system did not take the file.
        PlacementError: `placement` is something else: a `Plan` says neither ranks nor layers.
    """
    hint = "; ExpertPlacement(plan.placement, plan.shares, ranks, layers) makes one of a plan"
    check_type("placement", placement, ExpertPlacement, PlacementError, hint)
    file_format = _choose_format(Path(path), PLACEMENT_FORMATS, format)
    file_format.write(Path(path), placement)
    loss = _loss(file_format, _placement_content(placement))
    return "; ".join(filter(None, (loss, _layer_number_warning(file_format, placement)))) or None


def statistics_format(path: FilePath, format: str | None = None) -> Format:
    """Returns the format in which statistics are written to `path`. Raises `FormatError`."""
    return _choose_format(Path(path), STATISTICS_FORMATS, format)


def placement_format(path: FilePath, format: str | None = None) -> Format:
    """Returns the format in which a placement is written to `path`. Raises `FormatError`."""
    return _choose_format(Path(path), PLACEMENT_FORMATS, format)


def _statistics(file: DecodedFile, file_format: StatisticsFormat) -> ExpertStatistics:
    statistics = _name_file_in_errors(file, lambda: file_format.read(file))
    return replace(statistics, source=f"{file_format.name}: {file.path}")


def _placement(
    file: DecodedFile, file_format: PlacementFormat, ranks: int | None
) -> ExpertPlacement:
    placement = _name_file_in_errors(file, lambda: file_format.read(file, ranks))
    numbering = _numbering(file_format, placement, file)
    return replace(placement, source=f"{file_format.name}: {file.path}", numbering=numbering)


def _numbering(
    file_format: PlacementFormat, placement: ExpertPlacement, file: DecodedFile
) -> LayerNumbering:
    """Returns which layers the file numbers."""
    if set(file.fields) == {PHYSICAL_TO_LOGICAL}:  # SGLang's own file
        return LayerNumbering.EVERY_LAYER
    has_numbers = file_format.by_layer_number and file_format.name not in NUMBERS_OPTIONAL
    if has_numbers or placement.layers != tuple(range(len(placement.layers))):
        return LayerNumbering.MODEL
    # Engines number the layers with experts 0, 1, ...; files that we write have the model's
    # numbers where they are known.
    return LayerNumbering.MODEL if "layers" in file.fields else LayerNumbering.UNKNOWN


def _open(path: Path) -> DecodedFile:
    if is_folder(path):
        # The reader of a folder's format opens the files in it; here it only has to be recognised.
        marks = {
            file_format.key_field: None
            for file_format in STATISTICS_FORMATS
            if FOLDER_SUFFIX in file_format.read_suffixes
        }
        return DecodedFile(path, FOLDER_SUFFIX, marks)
    return decode_file(path)


def _find_format(file: DecodedFile, formats: Sequence[Kind], content: str) -> Kind:
    for file_format in formats:
        if file_format.key_field in file.fields and file.suffix in file_format.read_suffixes:
            return file_format
    if file.suffix == FOLDER_SUFFIX:
        raise file.error(f"is a folder, and not {content}")
    for other in known_formats():
        if other.key_field in file.fields and file.suffix in other.read_suffixes:
            kind = "statistics" if isinstance(other, StatisticsFormat) else "a placement"
            raise file.error(f"is {kind} (format {other.name}), not {content}")
    marks = ", ".join(dict.fromkeys(f.key_field for f in formats if file.suffix in f.read_suffixes))
    if not marks:
        raise file.error(f"is not {content}: a {file.suffix} file never is")
    raise file.error(f"is not {content}: has none of the fields {marks}")


def _name_file_in_errors(file: DecodedFile, read: Callable[[], Value]) -> Value:
    """Calls `read`; adds the file to a `PlacementError`, which names only the value."""
    try:
        return read()
    except PlacementError as error:
        raise file.error(str(error)) from None


def _choose_format(path: Path, formats: Sequence[Kind], name: str | None) -> Kind:
    suffix = path.suffix.lower()
    if name is None:
        candidates = [
            file_format for file_format in formats if suffix in file_format.write_suffixes
        ]
        if not candidates:
            suffixes = ", ".join(dict.fromkeys(s for f in formats for s in f.write_suffixes if s))
            raise FormatError(str(path), f"has a suffix that is not known to write: {suffixes}")
        return candidates[0]
    candidates = [
        file_format
        for file_format in formats
        if file_format.name == name and file_format.write_suffixes
    ]
    if not candidates:
        names = ", ".join(file_format.name for file_format in formats if file_format.write_suffixes)
        raise FormatError(str(path), f"cannot be written as {name}: known are {names}")
    if (
        suffix not in candidates[0].write_suffixes
        and FOLDER_SUFFIX not in candidates[0].write_suffixes
    ):
        suffixes = ", ".join(candidates[0].write_suffixes)
        raise FormatError(str(path), f"is written as {name} with a suffix of {suffixes}")
    return candidates[0]


def _statistics_content(statistics: ExpertStatistics) -> dict[FileContent, bool]:
    return {
        FileContent.WINDOWS: statistics.windows > 1,
        FileContent.LAYERS: statistics.layers != tuple(range(len(statistics.layers))),
        FileContent.BY_RANK: statistics.by_rank is not None,
        FileContent.ITERATIONS: statistics.first_iteration is not None,
        FileContent.TOP_K: statistics.top_k is not None,
    }


def _placement_content(placement: ExpertPlacement) -> dict[FileContent, bool]:
    # The number of ranks alone is no loss, see `_loss`: the engine is started with it.
    return {
        FileContent.SHARES: not placement.is_even,
        FileContent.LAYERS: placement.layers != tuple(range(len(placement.layers))),
    }


def _loss(file_format: Format, content: dict[FileContent, bool]) -> str | None:
    missing = [
        part for part, present in content.items() if present and part not in file_format.carries
    ]
    if not missing:
        return None
    if isinstance(file_format, PlacementFormat) and FileContent.RANKS not in file_format.carries:
        missing.append(FileContent.RANKS)
    return f"{file_format.name} does not carry {', '.join(missing)}: lost"


def _layer_number_warning(file_format: PlacementFormat, placement: ExpertPlacement) -> str | None:
    """Returns a warning if a reader would take `layers` for other layers."""
    if (
        file_format.by_layer_number
        and file_format.name not in NUMBERS_OPTIONAL
        and placement.numbering is LayerNumbering.UNKNOWN
    ):
        meaning = UNKNOWN_NUMBERS
    elif not file_format.by_layer_number and placement.numbering is LayerNumbering.EVERY_LAYER:
        meaning = "the place among layers with experts, and the source has a row for dense ones too"
    else:
        return None
    return _numbers_warning(file_format, meaning, placement.layers[-1])


def _numbers_warning(file_format: Format, meaning: str, last: int) -> str:
    return (
        f"{file_format.name} goes by {meaning}: "
        f"0 to {last} are right only where every layer has experts"
    )


def _unknown_numbers_warning(file_format: Format, statistics: ExpertStatistics) -> str | None:
    """Returns a warning if a file gets numbers of layers that nothing has told."""
    known = statistics.numbering is not LayerNumbering.UNKNOWN
    if known or file_format.name in NUMBERS_OPTIONAL:
        return None
    return _numbers_warning(file_format, UNKNOWN_NUMBERS, statistics.layers[-1])


def _rank_warning(file_format: Format, statistics: ExpertStatistics) -> str | None:
    """Returns a warning if a reader would take counts by rank for known that are not."""
    if (
        FileContent.BY_RANK in file_format.carries
        and FOLDER_SUFFIX in file_format.write_suffixes
        and statistics.by_rank is None
    ):
        return f"{file_format.name} has counts by rank: all were written as those of rank 0"
    return None
