"""Reads and writes the expert map of vllm-ascend (`expert_map_path`), a JSON file.

    {"moe_layer_count": 1, "layer_list": [
        {"layer_id": 0, "device_count": 2, "device_list": [
            {"device_id": 0, "device_expert": [0, 1]}, {"device_id": 1, "device_expert": [1, 2]}]}]}

Source: vllm_ascend/eplb, `expert_file_to_tensor` and `_export_tensor_to_file`.
"""

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.decoded_file import DecodedFile
from equipoise.balancer.formats.encodings import encode_json
from equipoise.balancer.formats.numbers import int32_array, int64_array, parse_integer, short_repr
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.hal.errors import PlacementError

LAYER_COUNT = "moe_layer_count"
LAYER_LIST = "layer_list"
DEVICE_AXES = "device", "slot"


def unpack(file: DecodedFile, ranks: int | None) -> ExpertPlacement:
    """Reads the map of every layer; devices are ranks.

    Raises `FormatError` and `PlacementError`.
    """
    entries = _entries(file.fields, LAYER_LIST, "the file")
    if file.integer(LAYER_COUNT) != len(entries):
        raise file.error(
            f"{LAYER_COUNT} is {file.integer(LAYER_COUNT)}, and {LAYER_LIST} has {len(entries)}"
        )
    rows: dict[int, npt.NDArray[np.int32]] = {}
    for at, entry in enumerate(entries):
        layer = _number(entry, "layer_id", f"entry {at} of {LAYER_LIST}")
        if layer in rows:
            raise file.error(f"layer {layer} is given twice")
        rows[layer] = _devices(entry, f"layer {layer}")
    # vllm-ascend ignores `layer_id` and uses the position in the list, so positions must ascend
    # with the numbers; `ExpertPlacement` refuses other orders.
    layers = tuple(rows)
    shape = rows[layers[0]].shape if layers else (0, 0)
    for layer in layers:
        if rows[layer].shape != shape:
            raise file.error(
                f"layer {layer} has devices x slots {rows[layer].shape}, layer {layers[0]} {shape}"
            )
    if ranks not in (None, shape[0]):
        raise file.error(f"has {shape[0]} devices, not {ranks}")
    placement = np.array([rows[layer].ravel() for layer in layers], dtype=np.int32)
    return ExpertPlacement.with_even_shares(placement.reshape(len(layers), -1), shape[0], layers)


def pack(placement: ExpertPlacement) -> bytes:
    """Encodes the file."""
    shape = len(placement.layers), placement.ranks, -1
    return encode_json(
        {
            LAYER_COUNT: len(placement.layers),
            LAYER_LIST: [
                {
                    "layer_id": layer,
                    "device_count": len(devices),
                    "device_list": [
                        {"device_id": device, "device_expert": experts}
                        for device, experts in enumerate(devices)
                    ],
                }
                for layer, devices in zip(
                    placement.layers,
                    placement.placement.reshape(shape).tolist(),
                    strict=True,
                )
            ],
        }
    )


def _devices(entry: dict[str, object], where: str) -> npt.NDArray[np.int32]:
    """Returns int32 (devices, slots) of a layer, in order of device_id."""
    listed = _entries(entry, "device_list", where)
    if _number(entry, "device_count", where) != len(listed):
        count = short_repr(entry["device_count"])
        raise PlacementError(f"{where}: device_count is {count}, and there are {len(listed)}")
    experts: dict[int, object] = {}
    for device in listed:
        experts[_number(device, "device_id", where)] = device.get("device_expert")
    if sorted(experts) != list(range(len(listed))):
        raise PlacementError(f"{where}: device_id is not 0 to {len(listed) - 1}, once each")
    table = [experts[device] for device in range(len(listed))]
    return int32_array(where, int64_array(where, table, DEVICE_AXES), DEVICE_AXES)


def _entries(entry: object, key: str, where: str) -> list[dict[str, object]]:
    entries = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(entries, list) or not entries:
        raise PlacementError(f"{where}: {key} is {short_repr(entries)}, not a list of objects")
    for inner in entries:
        if not isinstance(inner, dict):
            raise PlacementError(f"{where}: {key} holds {short_repr(inner)}, not objects")
    return entries


def _number(entry: dict[str, object], key: str, where: str) -> int:
    return parse_integer(f"{where}: {key}", entry.get(key))
