"""A decode step with and without an epoch that runs beside it.

Two loops in one process serve the same tokens with the same weights: beside one an epoch runs
nearly all the time, beside the other none ever opens. They serve in turns. A step lasts on the
device's clock from the end of the one before to its own end.

An epoch moves at most 1% of what a step reads: bytes are counted each time that they are read or
written in device memory, sums included, against the weights that a step reads, counted once. Slots
a layer are as many as keep to that; where one is too many, the step is made longer.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda_clock import MILLI, scaled, spread
from cuda_experts import BFLOAT16, FLOAT8, Dimensions
from cuda_library import Library
from cuda_model import Model
from cuda_place import Place
from cuda_plans import BOUNDARY, LOCKED, PASSES, STEPS_OF_A_LOT
from cuda_serving import Mode, Run, Serving, Setting, group

from equipoise.hal.communicator import Fabric
from equipoise.hal.stream import Role

SHARE = 0.01
"""Of a step's memory traffic, at most."""
WARM_UP = 10
"""Steps of a run that finds how long one is."""
LEAST = 5.5e-3
"""Seconds of a step: no less than 5 ms, in every run."""
CAPTURED = Mode("captured", captured=True, ahead=1)
WAITING = Mode("captured, the host waits for every step", captured=True, ahead=0)
LAUNCHED = Mode("launched one by one", captured=False, ahead=1)
Figures = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How large and how often.

    Attributes:
        model: its dimensions.
        seconds: of a step, at least.
        pairs: of runs, with and without.
        steps: of a run that is judged.
        reported: of a run that is not.
    """

    model: Dimensions
    seconds: float
    pairs: int
    steps: int
    reported: int


FULL = Sizes(
    Dimensions(
        hidden=7168,
        intermediate=2048,
        experts=256,
        slots=288,
        ranks=32,
        layers=4,
        tokens=1024,
        top_k=8,
        rows=64,
    ),
    LEAST,
    pairs=5,
    steps=300,
    reported=100,
)
TRIAL = Sizes(
    Dimensions(
        hidden=256,
        intermediate=128,
        experts=16,
        slots=24,
        ranks=4,
        layers=3,
        tokens=16,
        top_k=2,
        rows=4,
    ),
    seconds=2e-3,
    pairs=2,
    steps=60,
    reported=20,
)


def measured(place: Place, sizes: Sizes) -> Figures:
    """Both dtypes, both paths as far as they are declared, all modes."""
    with group(place) as fabric:
        rows = []
        for dtype in (BFLOAT16, FLOAT8):
            rows += _dtype(place, fabric, sizes, dtype)
            gc.collect()
    return {"share": SHARE, "pairs": sizes.pairs, "left_out": left_out(place), "rows": rows}


def left_out(place: Place) -> list[str]:
    """What is not measured, for lack of what it takes."""
    found = []
    if LOCKED not in paths(place):
        found.append(f"{place.backend.name} declares no stream locks: no locked path")
    if CAPTURED not in modes(place):
        found.append(f"{place.backend.name} captures no graphs")
    return found


def paths(place: Place) -> tuple[str, ...]:
    """Those that the backend declares what they take."""
    declared = place.backend.capabilities
    if declared.stream_lock and declared.copy_independent_of_launch:
        return (BOUNDARY, LOCKED)
    return (BOUNDARY,)


def modes(place: Place) -> tuple[Mode, ...]:
    """Those that the backend declares what they take."""
    graphs = place.backend.capabilities.graph_capture
    return (CAPTURED, WAITING, LAUNCHED) if graphs else (LAUNCHED,)


def _dtype(place: Place, fabric: Fabric, sizes: Sizes, dtype: str) -> list[Figures]:
    """All rows of a dtype, on one pair of models."""
    first, second = (Model(place, sizes.model, dtype) for _ in range(2))
    library = Library(first)
    rows = []
    for path in paths(place):
        fill(first, fabric, library, path, sizes.seconds)
        second.padding = first.padding
        slots = slots_a_layer(first, path)
        moving, still = (
            Serving(model, library, fabric, Setting(path, count))
            for model, count in ((first, slots), (second, 0))
        )
        for mode in modes(place):
            sys.stderr.write(f"decode: {dtype}, {path}, {mode.name}\n")
            steps = sizes.steps if mode.captured and mode.ahead else sizes.reported
            runs = list(pairs(moving, still, mode, sizes.pairs, steps))
            rows.append(
                {"dtype": dtype, "path": path, "mode": mode.name, "experts": first.experts.way}
                | figures(runs, first, path, slots)
            )
        for serving in (moving, still):
            serving.close()
    return rows


def fill(model: Model, fabric: Fabric, library: Library, path: str, seconds: float) -> None:
    """Make its step long enough, for the clock and for one slot a layer."""
    model.padding = 0
    bare = Serving(model, library, fabric, Setting(path, 0))
    mode = modes(model.place)[0]
    found = min(bare.run(WARM_UP, mode).seconds)
    bare.close()
    least = int(moved_bytes(model, path, 1) / STEPS_OF_A_LOT[path] / SHARE)
    model.fill_to(model.place.clock(Role.COMPUTE), seconds, least, found)


def moved_bytes(model: Model, path: str, slots: int) -> int:
    """Bytes that so many slots' moves read and write in device memory."""
    slot = sum(segment.type.nbytes for segment in model.slots[0])
    return slots * slot * PASSES[path]


def slots_a_layer(model: Model, path: str) -> int:
    """As many as keep to the share while one layer after the other changes; at least one."""
    room = model.traffic * SHARE * STEPS_OF_A_LOT[path] / moved_bytes(model, path, 1)
    return max(1, min(int(room), model.sizes.here - 2))


def pairs(
    moving: Serving, still: Serving, mode: Mode, count: int, steps: int
) -> Iterator[tuple[Run, Run]]:
    """With an epoch and without, in turns; every other pair begins without."""
    for turn in range(count):
        found: dict[bool, Run] = {}
        for with_epoch in (True, False) if turn % 2 == 0 else (False, True):
            serving = moving if with_epoch else still
            found[with_epoch] = serving.run(steps, mode)
            serving.rest(mode)
        yield found[True], found[False]


def figures(runs: Sequence[tuple[Run, Run]], model: Model, path: str, slots: int) -> Figures:
    """What the runs come to."""
    steps = sum(len(run.seconds) for run, _ in runs)
    epochs = sum(run.epochs for run, _ in runs)
    moved = slots * model.sizes.layers * epochs
    slot = sum(segment.type.nbytes for segment in model.slots[0])
    row: Figures = {
        "slots_a_layer": slots,
        "steps": len(runs[0][0].seconds),
        "epochs": epochs,
        "inside": sum(run.inside for run, _ in runs) / steps,
        "traffic": model.traffic,
        "share": moved_bytes(model, path, moved) / steps / model.traffic,
        "peak_share": moved_bytes(model, path, slots) / STEPS_OF_A_LOT[path] / model.traffic,
        "delivered": moved * slot / steps,
    }
    for name, part in (("median", 50), ("p99", 99)):
        ours, theirs = (
            [float(np.percentile(run[place].seconds, part)) for run in runs] for place in (0, 1)
        )
        row[name] = {"with": scaled(ours, MILLI), "without": scaled(theirs, MILLI)}
        row[f"{name}_ratio"] = spread(a / b for a, b in zip(ours, theirs, strict=True))
    row["least_ms"] = min(min(run.seconds) for pair in runs for run in pair) * MILLI
    return row
