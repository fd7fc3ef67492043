"""`moe_load_balancer.yaml`, the configuration with which TensorRT-LLM's load balancer starts.

    initial_global_assignments:
      3: [0, 1, 2, 3, 0, 2]
    layer_updates_per_iter: 0
    num_slots: 6

`ep_size` stands there in a side branch only: it is read where it is, and never written.
"""

import numpy as np

from equipoise.balancer.formats.decoded_file import DecodedFile
from equipoise.balancer.formats.encodings import encode_yaml
from equipoise.balancer.formats.numbers import MAX_LAYERS, int32_array, int64_array, short_repr
from equipoise.balancer.formats.placement import Arrangement
from equipoise.hal.errors import PlacementError

ASSIGNMENTS = "initial_global_assignments"
SLOTS = "num_slots"
UPDATES = "layer_updates_per_iter"
RANKS = "ep_size"


def unpack(bundle: DecodedFile, ranks: int) -> Arrangement:
    """The assignment of every layer. Raises `FormatError` and `PlacementError`."""
    slots = bundle.integer(SLOTS)
    if (bundle.optional_integer(UPDATES) or 0) < 0:
        raise bundle.error(f"{UPDATES} is {bundle.optional_integer(UPDATES)}, below 0")
    assigned = bundle.fields.get(ASSIGNMENTS)
    if not isinstance(assigned, dict) or not assigned:
        raise bundle.error(f"{ASSIGNMENTS} is {short_repr(assigned)}, not a mapping of layers")
    rows: dict[int, object] = {}
    for name, row in assigned.items():
        layer = _layer(name)
        if layer in rows:
            raise bundle.error(f"layer {layer} is given twice")
        if isinstance(row, list) and len(row) != slots:
            raise bundle.error(f"layer {layer} has {len(row)} slots, {SLOTS} is {slots}")
        rows[layer] = int64_array(f"layer {layer}", row, ("slot",))
    layers = tuple(sorted(rows))
    placement = np.array([rows[layer] for layer in layers])
    return Arrangement.with_even_shares(
        int32_array(ASSIGNMENTS, placement, ("layer", "slot")), ranks, layers
    )


def pack(arrangement: Arrangement, layer_updates_per_iter: int = 0) -> bytes:
    """The bytes of the file; without updates the assignment is static."""
    rows = zip(arrangement.layers, arrangement.placement.tolist(), strict=True)
    return encode_yaml(
        {ASSIGNMENTS: dict(rows), SLOTS: arrangement.slots, UPDATES: layer_updates_per_iter}
    )


def _layer(name: str) -> int:
    if not name.isascii() or not name.isdigit() or len(name) > 5 or int(name) >= MAX_LAYERS:
        raise PlacementError(f"{ASSIGNMENTS}: {short_repr(name)} is not the number of a layer")
    return int(name)
