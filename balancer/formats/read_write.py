"""Reading and writing: the format is found, the value checked, and what is lost is said."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from equipoise.balancer.formats.decoded_file import DecodedFile, decode_file
from equipoise.balancer.formats.eplb_maps import PHYSICAL_TO_LOGICAL
from equipoise.balancer.formats.files import is_folder
from equipoise.balancer.formats.placement import Arrangement, LayerNumbering
from equipoise.balancer.formats.registry import (
    FOLDER_SUFFIX,
    PLACEMENT_FORMATS,
    STATISTICS_FORMATS,
    FileContent,
    Format,
    PlacementFormat,
    StatisticsFormat,
)
from equipoise.balancer.formats.statistics import Statistics
from equipoise.hal.errors import FormatError, PlacementError

FilePath = str | os.PathLike[str]
Kind = TypeVar("Kind", bound=Format)
Value = TypeVar("Value")


def known() -> tuple[Format, ...]:
    """Every format, of statistics first."""
    return *STATISTICS_FORMATS, *PLACEMENT_FORMATS


def read_statistics(path: FilePath) -> Statistics:
    """The statistics in a file, or in a folder; the format is found by suffix and content.

    Args:
        path: in any of the formats of docs/formats.md: TensorRT-LLM's, SGLang's, CSV, ...

    Raises:
        FormatError: the file cannot be read; one line that names file, layer and value.
    """
    bundle = _open(Path(path))
    return _statistics(bundle, _find_format(bundle, STATISTICS_FORMATS, "statistics"))


def read_placement(path: FilePath, *, ranks: int | None = None) -> Arrangement:
    """The placement in a file; the format is found by suffix and content.

    Shares are even where the file has none.

    Args:
        path: in any of the formats of docs/formats.md: TensorRT-LLM's, vLLM's, SGLang's,
            vllm-ascend's, NumPy's, ours.
        ranks: needed where the file does not say it; must agree where it does.

    Raises:
        FormatError: the file cannot be read; one line that names file, layer and value.
        RanksUnsaid: nobody says how many ranks there are.
    """
    bundle = _open(Path(path))
    return _placement(bundle, _find_format(bundle, PLACEMENT_FORMATS, "a placement"), ranks)


def read_either(path: FilePath, *, ranks: int | None = None) -> Statistics | Arrangement:
    """What a file holds; the format is found by suffix and content.

    With `ranks` it is taken for a placement: an array without a name may be either, and only a
    placement has ranks. Raises `FormatError`, in one line that names file, layer and value.
    """
    bundle = _open(Path(path))
    if ranks is not None:
        return _placement(bundle, _find_format(bundle, PLACEMENT_FORMATS, "a placement"), ranks)
    formats: tuple[StatisticsFormat | PlacementFormat, ...] = (
        *STATISTICS_FORMATS,
        *PLACEMENT_FORMATS,
    )
    form = _find_format(bundle, formats, "statistics or a placement")
    if isinstance(form, StatisticsFormat):
        return _statistics(bundle, form)
    return _placement(bundle, form, None)


def write_statistics(
    path: FilePath, statistics: Statistics, format: str | None = None
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
    """
    form = _choose_format(Path(path), STATISTICS_FORMATS, format)
    form.write(Path(path), statistics)
    lost = _loss(form, _statistics_content(statistics))
    return "; ".join(filter(None, (lost, _rank_warning(form, statistics)))) or None


def write_placement(path: FilePath, layout: Arrangement, format: str | None = None) -> str | None:
    """Write a file whole or not at all.

    Args:
        path: what is there is replaced.
        layout: what to write.
        format: a name of docs/formats.md; None for the one of the path's suffix.

    Returns:
        What the format loses, in words, or None. Even shares are nothing to lose.

    Raises:
        FormatError: no such format, or the system did not take the file.
    """
    form = _choose_format(Path(path), PLACEMENT_FORMATS, format)
    form.write(Path(path), layout)
    lost = _loss(form, _placement_content(layout))
    return "; ".join(filter(None, (lost, _layer_number_warning(form, layout)))) or None


def statistics_format(path: FilePath, format: str | None = None) -> Format:
    """The format that statistics would be written to `path` in. Raises `FormatError`."""
    return _choose_format(Path(path), STATISTICS_FORMATS, format)


def placement_format(path: FilePath, format: str | None = None) -> Format:
    """The format that a placement would be written to `path` in. Raises `FormatError`."""
    return _choose_format(Path(path), PLACEMENT_FORMATS, format)


def _statistics(bundle: DecodedFile, form: StatisticsFormat) -> Statistics:
    found = _name_file_in_errors(bundle, lambda: form.read(bundle))
    return replace(found, source=f"{form.name}: {bundle.path}")


def _placement(bundle: DecodedFile, form: PlacementFormat, ranks: int | None) -> Arrangement:
    found = _name_file_in_errors(bundle, lambda: form.read(bundle, ranks))
    numbering = _numbering(form, found, bundle)
    return replace(found, source=f"{form.name}: {bundle.path}", numbering=numbering)


def _numbering(form: PlacementFormat, found: Arrangement, bundle: DecodedFile) -> LayerNumbering:
    """Engines that go by the place of a layer number the layers with experts: 0, 1, ..."""
    if set(bundle.fields) == {PHYSICAL_TO_LOGICAL}:  # SGLang's
        return LayerNumbering.EVERY_LAYER
    if form.by_layer_number or found.layers != tuple(range(len(found.layers))):
        return LayerNumbering.MODEL
    # The files that we write tell the model's numbers beside the maps.
    return LayerNumbering.MODEL if "layers" in bundle.fields else LayerNumbering.UNKNOWN


def _open(path: Path) -> DecodedFile:
    if is_folder(path):
        # Its one format reads the files in it.
        marks = {
            form.key_field: None
            for form in STATISTICS_FORMATS
            if FOLDER_SUFFIX in form.read_suffixes
        }
        return DecodedFile(path, FOLDER_SUFFIX, marks)
    return decode_file(path)


def _find_format(bundle: DecodedFile, formats: Sequence[Kind], what: str) -> Kind:
    for form in formats:
        if form.key_field in bundle.fields and bundle.suffix in form.read_suffixes:
            return form
    if bundle.suffix == FOLDER_SUFFIX:
        raise bundle.error(f"is a folder, and not {what}")
    for other in known():
        if other.key_field in bundle.fields and bundle.suffix in other.read_suffixes:
            kind = "statistics" if isinstance(other, StatisticsFormat) else "a placement"
            raise bundle.error(f"is {kind} (format {other.name}), not {what}")
    marks = ", ".join(
        dict.fromkeys(f.key_field for f in formats if bundle.suffix in f.read_suffixes)
    )
    if not marks:
        raise bundle.error(f"is not {what}: a {bundle.suffix} file never is")
    raise bundle.error(f"is not {what}: has none of the fields {marks}")


def _name_file_in_errors(bundle: DecodedFile, read: Callable[[], Value]) -> Value:
    """What the values themselves refuse does not name the file yet."""
    try:
        return read()
    except PlacementError as error:
        raise bundle.error(str(error)) from None


def _choose_format(path: Path, formats: Sequence[Kind], name: str | None) -> Kind:
    suffix = path.suffix.lower()
    if name is None:
        found = [form for form in formats if suffix in form.write_suffixes]
        if not found:
            suffixes = ", ".join(dict.fromkeys(s for f in formats for s in f.write_suffixes if s))
            raise FormatError(str(path), f"has a suffix that is not known to write: {suffixes}")
        return found[0]
    found = [form for form in formats if form.name == name and form.write_suffixes]
    if not found:
        names = ", ".join(form.name for form in formats if form.write_suffixes)
        raise FormatError(str(path), f"cannot be written as {name}: known are {names}")
    if suffix not in found[0].write_suffixes and FOLDER_SUFFIX not in found[0].write_suffixes:
        suffixes = ", ".join(found[0].write_suffixes)
        raise FormatError(str(path), f"is written as {name} with a suffix of {suffixes}")
    return found[0]


def _statistics_content(statistics: Statistics) -> dict[FileContent, bool]:
    return {
        FileContent.WINDOWS: statistics.windows > 1,
        FileContent.LAYERS: statistics.layers != tuple(range(len(statistics.layers))),
        FileContent.BY_RANK: statistics.by_rank is not None,
        FileContent.ITERATIONS: statistics.first_iteration is not None,
        FileContent.TOP_K: statistics.top_k is not None,
    }


def _placement_content(layout: Arrangement) -> dict[FileContent, bool]:
    # Not the number of ranks: whoever starts the engine says it again.
    return {
        FileContent.SHARES: not layout.is_even,
        FileContent.LAYERS: layout.layers != tuple(range(len(layout.layers))),
    }


def _loss(form: Format, cargo: dict[FileContent, bool]) -> str | None:
    lost = [what for what, present in cargo.items() if present and what not in form.carries]
    return f"{form.name} does not carry {', '.join(lost)}: lost" if lost else None


def _layer_number_warning(form: PlacementFormat, layout: Arrangement) -> str | None:
    """What a reader takes for the numbers of layers, where they may be others."""
    if form.by_layer_number and layout.numbering is LayerNumbering.UNKNOWN:
        said = "the model's numbers of layers, which the source does not tell"
    elif not form.by_layer_number and layout.numbering is LayerNumbering.EVERY_LAYER:
        said = "the place among layers with experts, and the source has a row for dense ones too"
    else:
        return None
    last = layout.layers[-1]
    return f"{form.name} goes by {said}: 0 to {last} are right only where every layer has experts"


def _rank_warning(form: Format, statistics: Statistics) -> str | None:
    """What a reader of the format would take for known, and is not."""
    if (
        FileContent.BY_RANK in form.carries
        and FOLDER_SUFFIX in form.write_suffixes
        and statistics.by_rank is None
    ):
        return f"{form.name} has counts by rank: all were written as those of rank 0"
    return None
