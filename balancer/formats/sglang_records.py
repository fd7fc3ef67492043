"""Reads the records by forward pass of SGLang's expert distribution recorder, as routing traces.

In the modes `per_pass` and `per_token` every rank dumps a .pt file, `records` and
`last_physical_to_logical_map`. A record is of one forward pass of that rank: `forward_pass_id`,
`rank`, `global_physical_count` (layers, slots), and in the mode `per_token` also `forward_mode` and
`topk_ids_of_layer` (layers, tokens, 8), slots padded with -1. Slots become experts by the map. It
is the last one: placements that were replaced meanwhile are not in the file. Read in SGLang 0.5.23:
`sglang/srt/eplb/expert_distribution.py`.

torch maps the files into memory, so that they may be larger than it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.encodings import ZIP_MAGIC, array_of_tensor
from equipoise.balancer.formats.files import list_folder, open_file
from equipoise.balancer.formats.format_names import SGLANG_RECORDS
from equipoise.balancer.formats.numbers import format_index, int64_array, short_repr
from equipoise.balancer.formats.routing_trace import (
    MAX_EXPERTS,
    NO_EXPERT,
    CountsTrace,
    Ids,
    RoutingTrace,
    TraceUnit,
)
from equipoise.balancer.formats.sglang_distribution import RECORDS
from equipoise.balancer.formats.trace_counts import checked_block
from equipoise.balancer.formats.trace_parts import RawPart, open_trace
from equipoise.hal.errors import FormatError, PlacementError

SLOT_MAP = "last_physical_to_logical_map"
COUNT = "global_physical_count"
TOKENS = "topk_ids_of_layer"
PASS = "forward_pass_id"
EXTEND, DECODE = 1, 2
"""Of SGLang's `ForwardMode`: all tokens are of prompts, or none is."""
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class _Record:
    """One forward pass of one rank."""

    path: Path
    at: int
    fields: Mapping[str, object]
    step: int
    rank: int

    @property
    def where(self) -> str:
        return f"record {self.at}"

    def array(self, name: str, axes: tuple[str, ...]) -> npt.NDArray[np.int64]:
        """Returns a tensor as int64 with these axes. Raises `FormatError`."""
        array = array_of_tensor(self.path, f"{self.where}: {name}", self.fields.get(name))
        try:
            return int64_array(name, array, axes)
        except PlacementError as error:
            raise FormatError(str(self.path), f"{self.where}: {error}") from None


@dataclass(frozen=True, eq=False)
class _Recording:
    """The files of all ranks.

    Attributes:
        path: the file, or the folder of files.
        records: by forward pass, then by rank.
        slot_map: int64 (layers, slots): the expert of each slot.
    """

    path: Path
    records: tuple[_Record, ...]
    slot_map: npt.NDArray[np.int64]

    @property
    def experts(self) -> int:
        return int(self.slot_map.max()) + 1


def record_files(folder: Path) -> list[str]:
    """Returns the names of the .pt files in a folder."""
    return [name for name in list_folder(folder) if name.lower().endswith((".pt", ".pth"))]


def holds_records(path: Path) -> bool:
    """Returns whether a .pt file has records. Raises `FormatError` if it cannot be read."""
    with open_file(path) as stream:
        mapped = stream.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    # What torch wrote in its older form is read as a whole, by the reader of statistics.
    return mapped and RECORDS in _load(path)


def open_records(path: Path, files: list[Path]) -> RoutingTrace | CountsTrace:
    """Opens the files of the ranks, or of some of them. Raises `FormatError`."""
    recording = _recording(path, files)
    if any(TOKENS in record.fields for record in recording.records):
        return open_trace(
            f"{SGLANG_RECORDS}: {path}",
            TraceUnit.STEP,
            lambda: _parts(recording),
            recording.experts,
        )
    return _counts(recording)


def _recording(path: Path, files: list[Path]) -> _Recording:
    records: list[_Record] = []
    slot_map: npt.NDArray[np.int64] | None = None
    for file in files:
        fields = _load(file)
        loaded = fields.get(RECORDS)
        if not isinstance(loaded, list):
            raise FormatError(str(file), f"has no list {RECORDS}")
        try:
            array = array_of_tensor(file, SLOT_MAP, fields.get(SLOT_MAP))
            of_file = int64_array(SLOT_MAP, array, ("layer", "slot"))
        except PlacementError as error:
            raise FormatError(str(file), str(error)) from None
        if not of_file.size or of_file.min() < 0 or of_file.max() >= MAX_EXPERTS:
            raise FormatError(str(file), f"{SLOT_MAP} is empty, or has what is no expert")
        if of_file.max() >= of_file.shape[1]:
            what = f"{SLOT_MAP} has expert {of_file.max()} in {of_file.shape[1]} slots"
            raise FormatError(str(file), what)
        if slot_map is not None and not np.array_equal(slot_map, of_file):
            raise FormatError(str(file), f"{SLOT_MAP} is not that of {files[0].name}")
        slot_map = of_file
        records += [_record(file, at, record) for at, record in enumerate(loaded)]
    if not records or slot_map is None:
        raise FormatError(str(path), f"has no {RECORDS}")
    records.sort(key=lambda record: (record.step, record.rank))
    for before, record in pairwise(records):
        if (before.step, before.rank) == (record.step, record.rank):
            what = f"{record.where}: rank {record.rank} has forward pass {record.step} twice"
            raise FormatError(str(record.path), what)
    return _Recording(path, tuple(records), slot_map)


def _record(path: Path, at: int, record: object) -> _Record:
    if not isinstance(record, dict):
        raise FormatError(str(path), f"record {at} is {short_repr(record)}, not a dictionary")
    numbers = []
    for name in (PASS, "rank"):
        value = record.get(name)
        if type(value) is not int or value < 0:
            raise FormatError(str(path), f"record {at}: {name} is {short_repr(value)}")
        numbers.append(value)
    return _Record(path, at, record, *numbers)


def _parts(recording: _Recording) -> Iterator[RawPart]:
    layers, slots = recording.slot_map.shape
    for record in recording.records:
        chosen = record.array(TOKENS, ("layer", "token", "place"))
        if len(chosen) != layers:
            what = f"{record.where}: {TOKENS} has {len(chosen)} layers of {layers}"
            raise FormatError(str(record.path), what)
        wrong = np.argwhere((chosen < NO_EXPERT) | (chosen >= slots))
        if wrong.size:
            at = tuple(wrong[0].tolist())
            where = format_index(("layer", "token", "place"), at)
            what = f"{record.where}: {where}: slot {chosen[at]} of {slots}"
            raise FormatError(str(record.path), what)
        experts = recording.slot_map[np.arange(layers)[:, None, None], chosen]
        ids = np.where(chosen == NO_EXPERT, NO_EXPERT, experts).transpose(1, 0, 2)
        mode = record.fields.get("forward_mode")
        prompt = {EXTEND: len(ids), DECODE: 0}.get(mode) if type(mode) is int else None
        yield RawPart(
            record.path, record.where, ids, record.step, record.rank, prompt_tokens=prompt
        )


def _counts(recording: _Recording) -> CountsTrace:
    """Returns rows by pass of all ranks together; layers that no pass has rows of are left out."""
    steps: dict[int, list[_Record]] = {}
    for record in recording.records:
        steps.setdefault(record.step, []).append(record)
    groups = list(steps.values())
    used = np.zeros(len(recording.slot_map), dtype=np.bool_)
    for group in groups:
        used |= _logical_counts(recording, group).any(axis=1)
    if not used.any():
        raise FormatError(str(recording.path), "has no rows")
    kept = np.flatnonzero(used)
    layers = tuple(kept.tolist())

    def open_blocks(most_steps: int) -> Iterator[Ids]:
        for first in range(0, len(groups), most_steps):
            chunk = groups[first : first + most_steps]
            block = np.stack([_logical_counts(recording, group)[kept] for group in chunk])
            yield checked_block(recording.path, block, first, layers)

    source = f"{SGLANG_RECORDS}: {recording.path}"
    empty = tuple(np.flatnonzero(~used).tolist())
    return CountsTrace(
        layers, recording.experts, None, len(groups), source, open_blocks, empty_layers=empty
    )


def _logical_counts(recording: _Recording, records: list[_Record]) -> npt.NDArray[np.int64]:
    layers, slots = recording.slot_map.shape
    counts = np.zeros((layers, recording.experts), dtype=np.int64)
    for record in records:
        physical = record.array(COUNT, ("layer", "slot"))
        if physical.shape != (layers, slots) or physical.min() < 0:
            what = f"{COUNT} is {physical.shape}, expected {(layers, slots)}, none negative"
            raise FormatError(str(record.path), f"{record.where}: {what}")
        np.add.at(counts, (np.arange(layers)[:, None], recording.slot_map), physical)
    return counts


def _load(path: Path) -> dict[str, object]:
    """Maps a .pt file; only tensors and plain values are read. Raises `FormatError`."""
    import torch  # here, since only this format needs it, and importing takes seconds

    _check_archive(path)
    try:
        loaded = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        problem = "is damaged, or holds more than tensors and plain values, which is not read since"
        raise FormatError(
            str(path), f"{problem} it could run code ({type(error).__name__})"
        ) from None
    if not isinstance(loaded, dict):
        raise FormatError(str(path), f"holds {type(loaded).__name__}, not a dictionary")
    return loaded


def _check_archive(path: Path) -> None:
    """Checks sizes and CRCs piece by piece: what torch maps has to be in the file as it is said."""
    with open_file(path) as stream:
        try:
            with ZipFile(stream) as archive:
                for member in archive.infolist():
                    if member.compress_type != ZIP_STORED:
                        raise FormatError(str(path), f"{member.filename} is compressed")
                    with archive.open(member) as inner:
                        while inner.read(PIECE_BYTES):
                            pass
        except FormatError:
            raise
        except Exception as error:  # zipfile raises many types for a damaged archive
            reason = str(error).partition("\n")[0][:80]
            raise FormatError(str(path), f"is not a whole zip archive: {reason}") from None
