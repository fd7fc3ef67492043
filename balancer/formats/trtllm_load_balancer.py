"""Reads and writes `moe_load_balancer.yaml`, the configuration of TensorRT-LLM's load balancer.

    initial_global_assignments:
      3: [0, 1, 2, 3, 0, 2]
    layer_updates_per_iter: 0
    num_slots: 6

`ep_size` exists in a side branch only: it is read if present, and never written.
"""

import numpy as np

from equipoise.balancer.formats.decoded_file import DecodedFile
from equipoise.balancer.formats.encodings import encode_yaml
from equipoise.balancer.formats.numbers import MAX_LAYERS, int32_array, int64_array, short_repr
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.hal.errors import PlacementError

ASSIGNMENTS = "initial_global_assignments"
SLOTS = "num_slots"
UPDATES = "layer_updates_per_iter"
RANKS = "ep_size"


def unpack(file: DecodedFile, ranks: int) -> ExpertPlacement:
    """Reads the assignment of every layer. Raises `FormatError` and `PlacementError`."""
    slots = file.integer(SLOTS)
    if (file.optional_integer(UPDATES) or 0) < 0:
        raise file.error(f"{UPDATES} is {file.optional_integer(UPDATES)}, below 0")
    assigned = file.fields.get(ASSIGNMENTS)
    if not isinstance(assigned, dict) or not assigned:
        raise file.error(f"{ASSIGNMENTS} is {short_repr(assigned)}, not a mapping of layers")
    rows: dict[int, object] = {}
    for name, row in assigned.items():
        layer = _layer(name)
        if layer in rows:
            raise file.error(f"layer {layer} is given twice")
        if isinstance(row, list) and len(row) != slots:
            raise file.error(f"layer {layer} has {len(row)} slots, {SLOTS} is {slots}")
        rows[layer] = int64_array(f"layer {layer}", row, ("slot",))
    layers = tuple(sorted(rows))
    placement = np.array([rows[layer] for layer in layers])
    return ExpertPlacement.with_even_shares(
        int32_array(ASSIGNMENTS, placement, ("layer", "slot")), ranks, layers
    )


def pack(placement: ExpertPlacement, layer_updates_per_iter: int = 0) -> bytes:
    """Encodes the file; with 0 updates per iteration the assignment is static."""
    rows = zip(placement.layers, placement.placement.tolist(), strict=True)
    return encode_yaml(
        {ASSIGNMENTS: dict(rows), SLOTS: placement.slots, UPDATES: layer_updates_per_iter}
    )


def _layer(name: str) -> int:
    if not name.isascii() or not name.isdigit() or len(name) > 5 or int(name) >= MAX_LAYERS:
        raise PlacementError(f"{ASSIGNMENTS}: {short_repr(name)} is not the number of a layer")
    return int(name)
