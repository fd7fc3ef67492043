"""What it costs the host to put one layer's new map in force: vLLM's commit, and our engine's.

58 layers x 256 experts, 288 slots, 32 ranks, one thread, the thread's processor time; every slot of
the layer changes. The two take turns, eight layers each; of a turn the first layer counts by
itself, *cold*: it finds the caches full of the other's data, as behind a forward.

- vLLM's is its own `_commit_eplb_maps_for_layer` on CPU tensors of the shapes that the engine
  keeps (maps 1,024 wide): the map of slots, `compute_logical_maps` of the layer, padding, copies.
  On a device it also waits for the queue, which is not here.
- Ours is all that the host does for a layer: its tables and their digest, made beside the forward,
  and at the boundary the launch of nine copies of slots and of the tables' change. What the stream
  runs is apart, since here it is a thread.
"""

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from engine_figures import spread
from engine_rig import rig
from host_cost import SHAPE, commit_parts, engine_side, one_core
from torch import Tensor
from vllm.distributed.eplb.eplb_state import _commit_eplb_maps_for_layer, compute_logical_maps

WIDE = 1024
"""Of vLLM's map of experts to slots."""
ROUNDS, TURNS, IN_A_ROW = 7, 3, 8
MICRO = 1e6
Times = dict[str, float]


def commits() -> dict[str, dict[str, float]]:
    """Microseconds of parts, and ratios of the same round: median, least and most of rounds."""
    state = _state()
    with rig() as found:
        installed, layouts = engine_side(found)

        def theirs(layer: int) -> Times:
            row = layouts[layer % 2].placement[layer].astype(np.int64)
            return _theirs(state, torch.from_numpy(row), layer)

        def ours(layer: int) -> Times:
            return commit_parts(found, installed, layouts[layer % 2], layer)

        told = [_round(number, theirs, ours) for number in range(ROUNDS)]
    parts = {name: spread(each[name] * MICRO for each in told) for name in told[0]}
    ratios = {
        "ratio": lambda t: t["stock"] / t["all"],
        "ratio_cold": lambda t: t["stock, cold"] / t["all, cold"],
        "ratio_with_stream": lambda t: t["stock"] / (t["all"] + t["stream"]),
        "ratio_of_boundary": lambda t: t["stock"] / t["host"],
    }
    return {**parts, **{name: spread(map(ratio, told)) for name, ratio in ratios.items()}}


def _round(number: int, *rivals: Callable[[int], Times]) -> Times:
    """Medians of seconds, by part."""
    times: dict[str, list[float]] = {}
    with one_core():
        for turn in range(TURNS):
            for rival in rivals:
                for place in range(IN_A_ROW):
                    layer = (IN_A_ROW * (TURNS * number + turn) + place) % SHAPE.layers
                    for part, seconds in rival(layer).items():
                        times.setdefault(part if place else f"{part}, cold", []).append(seconds)
    return {name: statistics.median(each) for name, each in times.items()}


def _theirs(state: Any, row: Tensor, layer: int) -> dict[str, float]:
    """Seconds of the whole commit, and of the maps alone."""
    return {
        "stock": _cpu(lambda: _commit_eplb_maps_for_layer(state, row, layer)),
        "stock maps": _cpu(lambda: compute_logical_maps(row, SHAPE.experts)),
    }


def _state() -> Any:
    """What of `EplbModelState` a commit touches."""
    layers, experts = SHAPE.layers, SHAPE.experts
    return SimpleNamespace(
        physical_to_logical_map=torch.zeros(layers, SHAPE.slots, dtype=torch.int64),
        logical_to_physical_map=torch.full((layers, experts, WIDE), -1, dtype=torch.int64),
        logical_replica_count=torch.zeros(layers, experts, dtype=torch.int64),
    )


def _cpu(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began
