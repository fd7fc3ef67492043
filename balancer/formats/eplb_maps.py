"""Maps between logical experts and slots, as vLLM keeps them, and the table of Ascend's operator.

Field names, shapes and the padding with -1 are those of vLLM's EPLB state:
`physical_to_logical_map` (layers, slots), `logical_to_physical_map` (layers, experts, most copies),
`logical_replica_count` (layers, experts). SGLang starts from a JSON with the first of them and no
other key (`--init-expert-location`), whose rows are all layers of the model, dense ones too.
`eplb_table` is what `npu_moe_update_expert` takes, int32 (experts, columns): the number of copies,
then their slots; here with an axis of layers in front. Neither engine writes files of them, so the
files are our own: JSON, npz or safetensors with these fields, and `ranks` and `layers` beside them.
"""

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import ABSENT, logical_maps
from equipoise.balancer.formats.decoded_file import UNNAMED_ARRAY, DecodedFile
from equipoise.balancer.formats.numbers import format_index
from equipoise.balancer.formats.placement import Arrangement
from equipoise.hal.errors import FormatError

SLOT_AXES = "layer", "slot"
TABLE_AXES = "layer", "expert", "column"
PHYSICAL_TO_LOGICAL = "physical_to_logical_map"
LOGICAL_TO_PHYSICAL = "logical_to_physical_map"
REPLICA_COUNT = "logical_replica_count"
EPLB_TABLE = "eplb_table"


def unpack_maps(bundle: DecodedFile, ranks: int) -> Arrangement:
    """From `physical_to_logical_map`; what else there is must agree. Raises `FormatError`."""
    found = Arrangement.with_even_shares(
        bundle.int32_array(PHYSICAL_TO_LOGICAL, SLOT_AXES), ranks, bundle.layer_numbers()
    )
    back, count = logical_maps(found.placement, found.experts)
    if REPLICA_COUNT in bundle.fields:
        _compare(bundle, REPLICA_COUNT, count, TABLE_AXES[:2])
    if LOGICAL_TO_PHYSICAL in bundle.fields:
        given = bundle.int64_array(LOGICAL_TO_PHYSICAL, TABLE_AXES)
        padded = _pad(back, max(back.shape[2], given.shape[2]), ABSENT)
        _compare(bundle, LOGICAL_TO_PHYSICAL, padded, TABLE_AXES)
    return found


def pack_maps(arrangement: Arrangement) -> dict[str, npt.NDArray[np.generic]]:
    """All three maps, int64, no wider than the expert with the most copies needs."""
    back, count = logical_maps(arrangement.placement, arrangement.experts)
    maps = {
        PHYSICAL_TO_LOGICAL: arrangement.placement.astype(np.int64),
        LOGICAL_TO_PHYSICAL: back,
        REPLICA_COUNT: count,
    }
    return {**maps, **_ranks_and_layers(arrangement)}


def pack_physical_to_logical(arrangement: Arrangement) -> dict[str, npt.NDArray[np.generic]]:
    """`physical_to_logical_map` alone; layers that are not arranged hold slot modulo experts."""
    trivial = np.arange(arrangement.slots, dtype=np.int64) % arrangement.experts
    rows = np.tile(trivial, (arrangement.layers[-1] + 1, 1))
    rows[list(arrangement.layers)] = arrangement.placement
    return {PHYSICAL_TO_LOGICAL: rows}


def unpack_table(bundle: DecodedFile, ranks: int) -> Arrangement:
    """From an `eplb_table`. Raises `FormatError` that names layer, expert and value."""
    table = bundle.int32_array(EPLB_TABLE, TABLE_AXES)
    layers, experts, columns = table.shape
    if columns < 2 or not experts or not layers:
        what = "an expert needs two columns" if layers and experts else "it has no experts"
        raise bundle.error(f"{EPLB_TABLE} is of shape {table.shape}: {what}")
    numbers = bundle.layer_numbers() or tuple(range(layers))
    for layer, rows in zip(numbers, table, strict=False):
        for expert in np.flatnonzero((rows[:, 0] < 1) | (rows[:, 0] >= columns))[:1].tolist():
            what = f"has {rows[expert, 0]} copies in {columns - 1} columns"
            raise bundle.error(f"layer {layer}, expert {expert} {what}")
    slots = int(table[0, :, 0].sum())
    placement = [
        _experts_by_slot(bundle, layer, rows, slots)
        for layer, rows in zip(numbers, table, strict=False)
    ]
    return Arrangement.with_even_shares(
        np.array(placement, dtype=np.int32), ranks, bundle.layer_numbers()
    )


def pack_table(arrangement: Arrangement) -> dict[str, npt.NDArray[np.generic]]:
    """(layers, experts, columns) int32; what no copy needs is 0, as in the vendor's own test."""
    back, count = logical_maps(arrangement.placement, arrangement.experts)
    table = np.concatenate([count[:, :, None], np.maximum(back, 0)], axis=2)
    return {EPLB_TABLE: table.astype(np.int32), **_ranks_and_layers(arrangement)}


def unpack_slot_array(bundle: DecodedFile, ranks: int) -> Arrangement:
    """From an array without a name: (layers, slots), or (slots,) of one layer."""
    return Arrangement.with_even_shares(bundle.int32_array(UNNAMED_ARRAY, SLOT_AXES), ranks)


def _ranks_and_layers(arrangement: Arrangement) -> dict[str, npt.NDArray[np.generic]]:
    return {
        "ranks": np.array(arrangement.ranks, dtype=np.int64),
        "layers": np.array(arrangement.layers, dtype=np.int64),
    }


def _pad(back: npt.NDArray[np.int64], width: int, value: int) -> npt.NDArray[np.int64]:
    more = width - back.shape[2]
    return np.pad(back, ((0, 0), (0, 0), (0, more)), constant_values=value)


def _compare(
    bundle: DecodedFile, name: str, expected: npt.NDArray[np.int64], axes: tuple[str, ...]
) -> None:
    """Copies may be listed in any order; what they are must agree."""
    given = bundle.int64_array(name, axes)
    if given.shape != expected.shape:
        raise bundle.error(
            f"{name} is {given.shape}, of {PHYSICAL_TO_LOGICAL} follows {expected.shape}"
        )
    if len(axes) == len(TABLE_AXES):
        given, expected = -np.sort(-given, axis=2), -np.sort(-expected, axis=2)
    wrong = np.argwhere(given != expected)
    if wrong.size:
        where = tuple(wrong[0].tolist())
        what = f"{name} has {given[where]}, of {PHYSICAL_TO_LOGICAL} follows {expected[where]}"
        raise bundle.error(f"{format_index(axes[:2], where, bundle.layer_numbers())}: {what}")


def _experts_by_slot(
    bundle: DecodedFile, layer: int, rows: npt.NDArray[np.int32], slots: int
) -> npt.NDArray[np.int32]:
    """The expert in each slot of a layer."""
    row = np.full(slots, ABSENT, dtype=np.int32)
    for expert, (copies, *held) in enumerate(rows.tolist()):
        for slot in held[:copies]:
            if not 0 <= slot < slots:
                raise _slot_error(bundle, layer, expert, f"slot {slot} of {slots}")
            if row[slot] != ABSENT:
                raise _slot_error(bundle, layer, expert, f"slot {slot}, as has expert {row[slot]}")
            row[slot] = expert
    if (row == ABSENT).any():
        slot = int(np.flatnonzero(row == ABSENT)[0])
        raise bundle.error(f"layer {layer}: no expert is in slot {slot} of {slots}")
    return row


def _slot_error(bundle: DecodedFile, layer: int, expert: int, where: str) -> FormatError:
    return bundle.error(f"layer {layer}: expert {expert} has {where}")
