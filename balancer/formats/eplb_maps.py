"""Reads and writes vLLM's EPLB maps, SGLang's initial placement and Ascend's EPLB table.

Field names, shapes and the padding with -1 are those of vLLM's EPLB state:
`physical_to_logical_map` (layers, slots), `logical_to_physical_map` (layers, experts, most copies),
`logical_replica_count` (layers, experts). SGLang starts from a JSON file with the first of them and
no other key (`--init-expert-location`), with a row for every layer of the model, dense ones too.
`eplb_table` is the argument of `npu_moe_update_expert`, int32 (experts, columns): the number of
replicas, then their slots; here with a leading axis of layers. Neither vLLM nor Ascend writes files
of them, so the files are our own: JSON, npz or safetensors with these fields, `ranks` and `layers`.
"""

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import ABSENT, logical_maps
from equipoise.balancer.formats.decoded_file import UNNAMED_ARRAY, DecodedFile
from equipoise.balancer.formats.numbers import format_index
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.statistics import LayerNumbering
from equipoise.hal.errors import FormatError

SLOT_AXES = "layer", "slot"
TABLE_AXES = "layer", "expert", "column"
PHYSICAL_TO_LOGICAL = "physical_to_logical_map"
LOGICAL_TO_PHYSICAL = "logical_to_physical_map"
REPLICA_COUNT = "logical_replica_count"
EPLB_TABLE = "eplb_table"


def unpack_maps(file: DecodedFile, ranks: int) -> ExpertPlacement:
    """Reads `physical_to_logical_map`; other maps must agree with it. Raises `FormatError`."""
    placement = ExpertPlacement.with_even_shares(
        file.int32_array(PHYSICAL_TO_LOGICAL, SLOT_AXES), ranks, file.layer_numbers()
    )
    back, count = logical_maps(placement.placement, placement.experts)
    if REPLICA_COUNT in file.fields:
        _compare(file, REPLICA_COUNT, count, TABLE_AXES[:2])
    if LOGICAL_TO_PHYSICAL in file.fields:
        stored = file.int64_array(LOGICAL_TO_PHYSICAL, TABLE_AXES)
        # vLLM pads to a fixed width, which is wider than these replicas need.
        padded = _pad(back, max(back.shape[2], stored.shape[2]), ABSENT)
        _compare(file, LOGICAL_TO_PHYSICAL, padded, TABLE_AXES)
    return placement


def pack_maps(placement: ExpertPlacement) -> dict[str, npt.NDArray[np.generic]]:
    """Returns all three maps, int64, as wide as the expert with the most replicas needs."""
    back, count = logical_maps(placement.placement, placement.experts)
    maps = {
        PHYSICAL_TO_LOGICAL: placement.placement.astype(np.int64),
        LOGICAL_TO_PHYSICAL: back,
        REPLICA_COUNT: count,
    }
    return {**maps, **_ranks_and_layers(placement)}


def pack_physical_to_logical(placement: ExpertPlacement) -> dict[str, npt.NDArray[np.generic]]:
    """Returns only `physical_to_logical_map`; rows of layers without experts are slot % experts."""
    trivial = np.arange(placement.slots, dtype=np.int64) % placement.experts
    rows = np.tile(trivial, (placement.layers[-1] + 1, 1))
    rows[list(placement.layers)] = placement.placement
    return {PHYSICAL_TO_LOGICAL: rows}


def unpack_table(file: DecodedFile, ranks: int) -> ExpertPlacement:
    """Reads an `eplb_table`. Raises `FormatError` that names layer, expert and value."""
    table = file.int32_array(EPLB_TABLE, TABLE_AXES)
    layers, experts, columns = table.shape
    if columns < 2 or not experts or not layers:
        problem = "an expert needs two columns" if layers and experts else "it has no experts"
        raise file.error(f"{EPLB_TABLE} is of shape {table.shape}: {problem}")
    numbers = file.layer_numbers() or tuple(range(layers))
    for layer, rows in zip(numbers, table, strict=False):
        for expert in np.flatnonzero((rows[:, 0] < 1) | (rows[:, 0] >= columns))[:1].tolist():
            problem = f"has {rows[expert, 0]} copies in {columns - 1} columns"
            raise file.error(f"layer {layer}, expert {expert} {problem}")
    slots = int(table[0, :, 0].sum())
    placement = [
        _experts_by_slot(file, layer, rows, slots)
        for layer, rows in zip(numbers, table, strict=False)
    ]
    return ExpertPlacement.with_even_shares(
        np.array(placement, dtype=np.int32), ranks, file.layer_numbers()
    )


def pack_table(placement: ExpertPlacement) -> dict[str, npt.NDArray[np.generic]]:
    """Returns int32 (layers, experts, columns), padded with 0 as in the vendor's own test."""
    back, count = logical_maps(placement.placement, placement.experts)
    table = np.concatenate([count[:, :, None], np.maximum(back, 0)], axis=2)
    return {EPLB_TABLE: table.astype(np.int32), **_ranks_and_layers(placement)}


def unpack_slot_array(file: DecodedFile, ranks: int) -> ExpertPlacement:
    """Reads an unnamed array (layers, slots)."""
    return ExpertPlacement.with_even_shares(file.int32_array(UNNAMED_ARRAY, SLOT_AXES), ranks)


def _ranks_and_layers(placement: ExpertPlacement) -> dict[str, npt.NDArray[np.generic]]:
    fields: dict[str, npt.NDArray[np.generic]] = {
        "ranks": np.array(placement.ranks, dtype=np.int64)
    }
    if placement.numbering is not LayerNumbering.UNKNOWN:
        fields["layers"] = np.array(placement.layers, dtype=np.int64)
    return fields


def _pad(back: npt.NDArray[np.int64], width: int, value: int) -> npt.NDArray[np.int64]:
    more = width - back.shape[2]
    return np.pad(back, ((0, 0), (0, 0), (0, more)), constant_values=value)


def _compare(
    file: DecodedFile, name: str, expected: npt.NDArray[np.int64], axes: tuple[str, ...]
) -> None:
    """Raises `FormatError` if a map differs from `expected`; the order of replicas may differ."""
    stored = file.int64_array(name, axes)
    if stored.shape != expected.shape:
        raise file.error(
            f"{name} is {stored.shape}, of {PHYSICAL_TO_LOGICAL} follows {expected.shape}"
        )
    if len(axes) == len(TABLE_AXES):
        stored, expected = -np.sort(-stored, axis=2), -np.sort(-expected, axis=2)
    wrong = np.argwhere(stored != expected)
    if wrong.size:
        position = tuple(wrong[0].tolist())
        mismatch = (
            f"{name} has {stored[position]}, of {PHYSICAL_TO_LOGICAL} follows {expected[position]}"
        )
        raise file.error(f"{format_index(axes[:2], position, file.layer_numbers())}: {mismatch}")


def _experts_by_slot(
    file: DecodedFile, layer: int, rows: npt.NDArray[np.int32], slots: int
) -> npt.NDArray[np.int32]:
    """Returns the expert in each slot of a layer, int32 (slots,)."""
    row = np.full(slots, ABSENT, dtype=np.int32)
    for expert, (copies, *expert_slots) in enumerate(rows.tolist()):
        for slot in expert_slots[:copies]:
            if not 0 <= slot < slots:
                raise _slot_error(file, layer, expert, f"slot {slot} of {slots}")
            if row[slot] != ABSENT:
                raise _slot_error(file, layer, expert, f"slot {slot}, as has expert {row[slot]}")
            row[slot] = expert
    if (row == ABSENT).any():
        slot = int(np.flatnonzero(row == ABSENT)[0])
        raise file.error(f"layer {layer}: no expert is in slot {slot} of {slots}")
    return row


def _slot_error(file: DecodedFile, layer: int, expert: int, where: str) -> FormatError:
    return file.error(f"layer {layer}: expert {expert} has {where}")
