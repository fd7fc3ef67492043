"""Reading and writing: the format is found, the value checked, and what is lost is said."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from equipoise.balancer.formats.arrangement import Arrangement, Numbering
from equipoise.balancer.formats.bundle import Bundle, open_bundle
from equipoise.balancer.formats.files import is_folder
from equipoise.balancer.formats.maps import FORWARD
from equipoise.balancer.formats.registry import (
    FOLDER,
    PLACEMENTS,
    STATISTICS,
    Cargo,
    Format,
    PlacementFormat,
    StatisticsFormat,
)
from equipoise.balancer.formats.statistics import Statistics
from equipoise.hal.errors import FormatError, PlacementError

Named = str | os.PathLike[str]
Kind = TypeVar("Kind", bound=Format)
Value = TypeVar("Value")


def known() -> tuple[Format, ...]:
    """Every format, of statistics first."""
    return *STATISTICS, *PLACEMENTS


def read_statistics(path: Named) -> Statistics:
    """The statistics in a file, or in a folder; the format is found by suffix and content.

    Args:
        path: in any of the formats of docs/formats.md: TensorRT-LLM's, SGLang's, CSV, ...

    Raises:
        FormatError: the file cannot be read; one line that names file, layer and value.
    """
    bundle = _open(Path(path))
    return _statistics(bundle, _recognised(bundle, STATISTICS, "statistics"))


def read_placement(path: Named, *, ranks: int | None = None) -> Arrangement:
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
    return _placement(bundle, _recognised(bundle, PLACEMENTS, "a placement"), ranks)


def read_either(path: Named, *, ranks: int | None = None) -> Statistics | Arrangement:
    """What a file holds; the format is found by suffix and content.

    With `ranks` it is taken for a placement: an array without a name may be either, and only a
    placement has ranks. Raises `FormatError`, in one line that names file, layer and value.
    """
    bundle = _open(Path(path))
    if ranks is not None:
        return _placement(bundle, _recognised(bundle, PLACEMENTS, "a placement"), ranks)
    formats: tuple[StatisticsFormat | PlacementFormat, ...] = (*STATISTICS, *PLACEMENTS)
    form = _recognised(bundle, formats, "statistics or a placement")
    if isinstance(form, StatisticsFormat):
        return _statistics(bundle, form)
    return _placement(bundle, form, None)


def write_statistics(path: Named, statistics: Statistics, format: str | None = None) -> str | None:
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
    form = _chosen(Path(path), STATISTICS, format)
    form.write(Path(path), statistics)
    lost = _lost(form, _cargo_of_statistics(statistics))
    return "; ".join(filter(None, (lost, _made_up(form, statistics)))) or None


def write_placement(path: Named, layout: Arrangement, format: str | None = None) -> str | None:
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
    form = _chosen(Path(path), PLACEMENTS, format)
    form.write(Path(path), layout)
    lost = _lost(form, _cargo_of_arrangement(layout))
    return "; ".join(filter(None, (lost, _taken_for_numbers(form, layout)))) or None


def statistics_format(path: Named, format: str | None = None) -> Format:
    """The format that statistics would be written to `path` in. Raises `FormatError`."""
    return _chosen(Path(path), STATISTICS, format)


def placement_format(path: Named, format: str | None = None) -> Format:
    """The format that a placement would be written to `path` in. Raises `FormatError`."""
    return _chosen(Path(path), PLACEMENTS, format)


def _statistics(bundle: Bundle, form: StatisticsFormat) -> Statistics:
    found = _checked(bundle, lambda: form.read(bundle))
    return replace(found, origin=f"{form.name}: {bundle.path}")


def _placement(bundle: Bundle, form: PlacementFormat, ranks: int | None) -> Arrangement:
    found = _checked(bundle, lambda: form.read(bundle, ranks))
    numbering = _numbering(form, found, bundle)
    return replace(found, origin=f"{form.name}: {bundle.path}", numbering=numbering)


def _numbering(form: PlacementFormat, found: Arrangement, bundle: Bundle) -> Numbering:
    """Engines that go by the place of a layer number the layers with experts: 0, 1, ..."""
    if set(bundle.fields) == {FORWARD}:  # SGLang's
        return Numbering.EVERY
    if form.by_number or found.layers != tuple(range(len(found.layers))):
        return Numbering.MODEL
    # The files that we write tell the model's numbers beside the maps.
    return Numbering.MODEL if "layers" in bundle.fields else Numbering.UNKNOWN


def _open(path: Path) -> Bundle:
    if is_folder(path):
        # Its one format reads the files in it.
        marks = {form.mark: None for form in STATISTICS if FOLDER in form.reads}
        return Bundle(path, FOLDER, marks)
    return open_bundle(path)


def _recognised(bundle: Bundle, formats: Sequence[Kind], what: str) -> Kind:
    for form in formats:
        if form.mark in bundle.fields and bundle.suffix in form.reads:
            return form
    if bundle.suffix == FOLDER:
        raise bundle.error(f"is a folder, and not {what}")
    for other in known():
        if other.mark in bundle.fields and bundle.suffix in other.reads:
            kind = "statistics" if isinstance(other, StatisticsFormat) else "a placement"
            raise bundle.error(f"is {kind} (format {other.name}), not {what}")
    marks = ", ".join(dict.fromkeys(f.mark for f in formats if bundle.suffix in f.reads))
    if not marks:
        raise bundle.error(f"is not {what}: a {bundle.suffix} file never is")
    raise bundle.error(f"is not {what}: has none of the fields {marks}")


def _checked(bundle: Bundle, read: Callable[[], Value]) -> Value:
    """What the values themselves refuse does not name the file yet."""
    try:
        return read()
    except PlacementError as error:
        raise bundle.error(str(error)) from None


def _chosen(path: Path, formats: Sequence[Kind], name: str | None) -> Kind:
    suffix = path.suffix.lower()
    if name is None:
        found = [form for form in formats if suffix in form.writes]
        if not found:
            suffixes = ", ".join(dict.fromkeys(s for f in formats for s in f.writes if s))
            raise FormatError(str(path), f"has a suffix that is not known to write: {suffixes}")
        return found[0]
    found = [form for form in formats if form.name == name and form.writes]
    if not found:
        names = ", ".join(form.name for form in formats if form.writes)
        raise FormatError(str(path), f"cannot be written as {name}: known are {names}")
    if suffix not in found[0].writes and FOLDER not in found[0].writes:
        suffixes = ", ".join(found[0].writes)
        raise FormatError(str(path), f"is written as {name} with a suffix of {suffixes}")
    return found[0]


def _cargo_of_statistics(statistics: Statistics) -> dict[Cargo, bool]:
    return {
        Cargo.WINDOWS: statistics.windows > 1,
        Cargo.LAYERS: statistics.layers != tuple(range(len(statistics.layers))),
        Cargo.BY_RANK: statistics.by_rank is not None,
        Cargo.ITERATIONS: statistics.iterations is not None,
        Cargo.TOP_K: statistics.top_k is not None,
    }


def _cargo_of_arrangement(layout: Arrangement) -> dict[Cargo, bool]:
    # Not the number of ranks: whoever starts the engine says it again.
    return {
        Cargo.SHARES: not layout.is_even,
        Cargo.LAYERS: layout.layers != tuple(range(len(layout.layers))),
    }


def _lost(form: Format, cargo: dict[Cargo, bool]) -> str | None:
    lost = [what for what, present in cargo.items() if present and what not in form.carries]
    return f"{form.name} does not carry {', '.join(lost)}: lost" if lost else None


def _taken_for_numbers(form: PlacementFormat, layout: Arrangement) -> str | None:
    """What a reader takes for the numbers of layers, where they may be others."""
    if form.by_number and layout.numbering is Numbering.UNKNOWN:
        said = "the model's numbers of layers, which the source does not tell"
    elif not form.by_number and layout.numbering is Numbering.EVERY:
        said = "the place among layers with experts, and the source has a row for dense ones too"
    else:
        return None
    last = layout.layers[-1]
    return f"{form.name} goes by {said}: 0 to {last} are right only where every layer has experts"


def _made_up(form: Format, statistics: Statistics) -> str | None:
    """What a reader of the format would take for known, and is not."""
    if Cargo.BY_RANK in form.carries and FOLDER in form.writes and statistics.by_rank is None:
        return f"{form.name} has counts by rank: all were written as those of rank 0"
    return None
