"""Our own files: `equipoise-placement` as JSON, statistics as npz."""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.decoded_file import UNNAMED_ARRAY, DecodedFile
from equipoise.balancer.formats.encodings import encode_json
from equipoise.balancer.formats.numbers import short_repr
from equipoise.balancer.formats.placement import Arrangement
from equipoise.balancer.formats.statistics import COUNT_AXES, RANK_AXES, Statistics

FORMAT_FIELD = "format"
"""The field by which a placement is recognised."""
COUNTS_FIELD = "counts"
"""And statistics."""
NAME = "equipoise-placement"
VERSION = 1
SLOT_AXES = "layer", "slot"


def unpack_placement(bundle: DecodedFile, ranks: int) -> Arrangement:
    """The arrangement. Raises `FormatError`, also where a digest is not that of the rest."""
    if bundle.fields.get(FORMAT_FIELD) != NAME:
        raise bundle.error(
            f"{FORMAT_FIELD} is {short_repr(bundle.fields.get(FORMAT_FIELD))}, not {NAME!r}"
        )
    if bundle.integer("version") != VERSION:
        raise bundle.error(f"is of version {bundle.integer('version')}, not {VERSION}")
    found = Arrangement(
        bundle.int32_array("placement", SLOT_AXES),
        bundle.int32_array("shares", SLOT_AXES),
        ranks,
        bundle.layer_numbers(),
    )
    sizes = {"slots": found.slots, "experts": found.experts}
    for name, size in sizes.items():
        if bundle.integer(name) != size:
            raise bundle.error(f"says {bundle.integer(name)} {name}, and has {size}")
    for name, digest in (("digest", found.digest), ("seal", seal(found))):
        if bundle.fields.get(name) != digest:
            said = short_repr(bundle.fields.get(name))
            raise bundle.error(f"{name} is {said}, and of what is in it {digest}")
    return found


def pack_placement(arrangement: Arrangement) -> bytes:
    """The bytes of the file."""
    return encode_json(
        {
            FORMAT_FIELD: NAME,
            "version": VERSION,
            "ranks": arrangement.ranks,
            "slots": arrangement.slots,
            "experts": arrangement.experts,
            "layers": list(arrangement.layers),
            "digest": arrangement.digest,
            "seal": seal(arrangement),
            "placement": arrangement.placement.tolist(),
            "shares": arrangement.shares.tolist(),
        }
    )


def seal(arrangement: Arrangement) -> str:
    """Digest of what the plan's own leaves out: ranks and numbers of layers."""
    rest = [VERSION, arrangement.ranks, *arrangement.layers]
    state = blake2b(arrangement.digest.encode(), digest_size=16)
    state.update(np.array(rest, dtype="<i8").tobytes())
    return state.hexdigest()


def unpack_statistics(bundle: DecodedFile) -> Statistics:
    """Statistics out of npz, or fields of the same names elsewhere. Raises `FormatError`."""
    return Statistics(
        bundle.int64_array(COUNTS_FIELD, COUNT_AXES),
        bundle.layer_numbers(),
        bundle.int64_array("by_rank", RANK_AXES) if "by_rank" in bundle.fields else None,
        bundle.optional_integer("iterations"),
        bundle.optional_integer("top_k"),
    )


def pack_statistics(statistics: Statistics) -> dict[str, npt.NDArray[np.generic]]:
    """Fields of an npz file."""
    fields: dict[str, npt.NDArray[np.generic]] = {
        COUNTS_FIELD: statistics.counts,
        "layers": np.array(statistics.layers, dtype=np.int64),
    }
    if statistics.by_rank is not None:
        fields["by_rank"] = statistics.by_rank
    for name, value in (("iterations", statistics.first_iteration), ("top_k", statistics.top_k)):
        if value is not None:
            fields[name] = np.array(value, dtype=np.int64)
    return fields


def unpack_counts(bundle: DecodedFile) -> Statistics:
    """One array without a name: (layers, experts) or (windows, layers, experts)."""
    return Statistics(counts_of(bundle, UNNAMED_ARRAY))


def counts_of(bundle: DecodedFile, name: str) -> npt.NDArray[np.int64]:
    """A field of counts with or without windows, as (windows, layers, experts)."""
    if nesting_depth(bundle.fields[name]) == len(COUNT_AXES):
        return bundle.int64_array(name, COUNT_AXES)
    return bundle.int64_array(name, COUNT_AXES[1:])[None]


def nesting_depth(value: object) -> int:
    """Axes of an array, or how deep the first entry of nested lists lies."""
    if isinstance(value, np.ndarray):
        return value.ndim
    levels = 0
    while isinstance(value, list) and levels < len(COUNT_AXES):
        value = value[0] if value else None
        levels += 1
    return levels
