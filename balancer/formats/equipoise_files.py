"""Our own formats: `equipoise-placement` (JSON), statistics (npz), and unnamed arrays of counts."""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.decoded_file import UNNAMED_ARRAY, DecodedFile
from equipoise.balancer.formats.encodings import encode_json
from equipoise.balancer.formats.numbers import short_repr
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.statistics import (
    COUNT_AXES,
    RANK_AXES,
    ExpertStatistics,
    LayerNumbering,
)

FORMAT_FIELD = "format"
"""The field by which a placement file is recognised."""
COUNTS_FIELD = "counts"
"""The field by which a statistics file is recognised."""
NAME = "equipoise-placement"
VERSION = 1
SLOT_AXES = "layer", "slot"


def unpack_placement(file: DecodedFile, ranks: int) -> ExpertPlacement:
    """Reads a placement. Raises `FormatError`, also if a digest does not match the content."""
    if file.fields.get(FORMAT_FIELD) != NAME:
        raise file.error(
            f"{FORMAT_FIELD} is {short_repr(file.fields.get(FORMAT_FIELD))}, not {NAME!r}"
        )
    if file.integer("version") != VERSION:
        raise file.error(f"is of version {file.integer('version')}, not {VERSION}")
    placement = ExpertPlacement(
        file.int32_array("placement", SLOT_AXES),
        file.int32_array("shares", SLOT_AXES),
        ranks,
        file.layer_numbers(),
    )
    sizes = {"slots": placement.slots, "experts": placement.experts}
    for name, size in sizes.items():
        if file.integer(name) != size:
            raise file.error(f"says {file.integer(name)} {name}, and has {size}")
    for name, digest in (("digest", placement.digest), ("seal", seal(placement))):
        if file.fields.get(name) != digest:
            stored = short_repr(file.fields.get(name))
            raise file.error(f"{name} is {stored}, and of what is in it {digest}")
    return placement


def pack_placement(placement: ExpertPlacement) -> bytes:
    """Encodes a placement as a file, without numbers of layers where they are unknown."""
    numbers: dict[str, list[int]] = {"layers": list(placement.layers)}
    return encode_json(
        {
            FORMAT_FIELD: NAME,
            "version": VERSION,
            "ranks": placement.ranks,
            "slots": placement.slots,
            "experts": placement.experts,
            **({} if placement.numbering is LayerNumbering.UNKNOWN else numbers),
            "digest": placement.digest,
            "seal": seal(placement),
            "placement": placement.placement.tolist(),
            "shares": placement.shares.tolist(),
        }
    )


def seal(placement: ExpertPlacement) -> str:
    """Digest over the plan's digest and what that leaves out: ranks and layer numbers."""
    numbers = [VERSION, placement.ranks, *placement.layers]
    state = blake2b(placement.digest.encode(), digest_size=16)
    state.update(np.array(numbers, dtype="<i8").tobytes())
    return state.hexdigest()


def unpack_statistics(file: DecodedFile) -> ExpertStatistics:
    """Reads statistics from npz, or from fields of these names. Raises `FormatError`."""
    return ExpertStatistics(
        file.int64_array(COUNTS_FIELD, COUNT_AXES),
        file.layer_numbers(),
        file.int64_array("by_rank", RANK_AXES) if "by_rank" in file.fields else None,
        file.optional_integer("iterations"),
        file.optional_integer("top_k"),
        numbering=LayerNumbering.MODEL if "layers" in file.fields else LayerNumbering.UNKNOWN,
    )


def pack_statistics(statistics: ExpertStatistics) -> dict[str, npt.NDArray[np.generic]]:
    """Returns the fields of an npz file."""
    fields: dict[str, npt.NDArray[np.generic]] = {
        COUNTS_FIELD: statistics.counts,
    }
    if statistics.numbering is not LayerNumbering.UNKNOWN:
        fields["layers"] = np.array(statistics.layers, dtype=np.int64)
    if statistics.by_rank is not None:
        fields["by_rank"] = statistics.by_rank
    for name, value in (("iterations", statistics.first_iteration), ("top_k", statistics.top_k)):
        if value is not None:
            fields[name] = np.array(value, dtype=np.int64)
    return fields


def unpack_counts(file: DecodedFile) -> ExpertStatistics:
    """Reads an unnamed array: (layers, experts) or (windows, layers, experts)."""
    return ExpertStatistics(counts_of(file, UNNAMED_ARRAY), numbering=LayerNumbering.UNKNOWN)


def counts_of(file: DecodedFile, name: str) -> npt.NDArray[np.int64]:
    """Returns a field of counts, with or without windows, as (windows, layers, experts)."""
    if nesting_depth(file.fields[name]) == len(COUNT_AXES):
        return file.int64_array(name, COUNT_AXES)
    return file.int64_array(name, COUNT_AXES[1:])[None]


def nesting_depth(value: object) -> int:
    """Returns the number of axes of an array, or the depth of nested lists by first entries."""
    if isinstance(value, np.ndarray):
        return value.ndim
    levels = 0
    while isinstance(value, list) and levels < len(COUNT_AXES):
        value = value[0] if value else None
        levels += 1
    return levels
