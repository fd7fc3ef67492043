"""A decode step with and without a rebalance that runs beside it.

Two loops in one process serve the same tokens with the same weights: beside one a rebalance runs
nearly all the time, beside the other none ever opens. They serve in turns. A step lasts on the
device's clock from the end of the one before to its own end.

A loop is one rank that stands for one of many. Routing, counting, votes, jobs, copies, checksums,
locks and tables are the engine's own, in a group of one rank. What is planned is given: in every
rebalance and layer some of this rank's slots hand their experts on, so that no weight comes from a
peer, of which there are none. On the staged path it is packed, staged, summed and committed;
in place it comes from page-locked host memory.

A rebalance moves at most 1% of what a step reads: bytes are counted each time that they are read or
written in device memory, sums included, against the weights that a step reads, counted once. Slots
a layer are as many as keep to that; where one is too many, the step is made longer.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch
from lib.results import spread

from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.balancer import ExpertBalancer, build
from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.context import (
    BalancerContext,
    InPlaceFromHost,
    StagedFromPeers,
    UpdatePathConfig,
)
from equipoise.balancer.experts.engine.states import Idle, Staged, Transferring, Updating
from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Load,
    Placement,
    even_shares,
    initial_placement,
)
from equipoise.balancer.experts.planning.proposal import (
    Proposal,
    TransferLimits,
    in_place_proposal,
    staged_proposal,
)
from equipoise.balancer.experts.planning.rebalance_plan import RebalancePlan
from equipoise.balancer.experts.runtime.events import COMPLETED
from equipoise.balancer.experts.runtime.workers import thread_workers
from equipoise.balancer.experts.transfer.host_writes import HostWeights, StreamWriter
from equipoise.hal import registry
from equipoise.hal.checksum import MASK64
from equipoise.hal.communicator import Fabric, Rendezvous
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Role
from gpu.model import BFLOAT16, FLOAT8, Dimensions, Library, Model
from gpu.stopwatch import DEADLINE, MILLI, Mark, Place, scaled

STAGED, IN_PLACE = "staged", "in_place"
STEPS_PER_CHANGE = {STAGED: 2, IN_PLACE: 1}
"""Steps that a layer's change takes at least: staged, it is written in one, and voted on."""
PASSES = {STAGED: 10, IN_PLACE: 4}
"""How often a moved byte is read or written in device memory, at most. Staged: summed in
its slot (three times, where parts of a slot are put together first), packed (twice), unpacked
(twice), summed, committed (twice); in place: written, summed in its slot."""


class FixedPlanPath:
    """A path that proposes what it is given: slots of this rank hand on their experts, in turn.

    Args:
        inner: the path; all but planning is its own.
        shape: how many of everything.
        slots: that change in a layer.
        path: its name.
    """

    def __init__(self, inner: Any, shape: ExpertShape, slots: int, path: str) -> None:
        self._inner, self._shape, self._slots, self._path = inner, shape, slots, path
        self._turn = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, load: Load, layout: Layout) -> Proposal:
        """The next layout, with its tables and its migration plan."""
        self._turn += 1
        placement = handed_on(layout.placement, self._shape.slots_per_rank, self._slots, self._turn)
        after = Layout(placement, even_shares(placement, self._shape.experts))
        nothing = np.zeros(self._shape.layers, dtype=np.int64)
        drafted = RebalancePlan(after, tuple(range(self._shape.layers)), nothing, nothing)
        if self._path == IN_PLACE:
            return in_place_proposal(drafted, self._shape, 1)
        proposal = staged_proposal(
            drafted, layout, self._shape, TransferLimits(self._slots, 1, self._slots, 0)
        )
        if proposal.migration.remote_copies:
            raise RuntimeError("weights were to come from ranks that there are not")
        return proposal


def handed_on(placement: Placement, here: int, slots: int, turn: int) -> Placement:
    """Another placement: of rank 0 so many slots of every layer hold other experts of this rank.

    One slot alone is the last, which holds a second copy: it takes another each time. Several pass
    their experts round.
    """
    after = placement.copy()
    if slots == 1:
        after[:, here - 1] = placement[:, turn % (here - 1)]
        return after
    places = [(turn + place) % here for place in range(slots)]
    after[:, places] = placement[:, [*places[1:], places[0]]]
    return after


ALONE = EPGroup((0,), 0)
WINDOW = 4
"""Steps of a window of load; a rebalance opens behind every one unless the one before goes on."""
NEVER = 1 << 20
"""Windows between rebalances where there shall be none."""
WARM = 8
"""Steps at the beginning of a run that are not told."""
MOVING = Transferring | Staged | Updating
numbers = count()


@contextmanager
def group(place: Place) -> Iterator[Fabric]:
    """A group of one rank, of the communicator that goes with the backend."""
    backend = registry.communicator(place.backend.communicator)
    host = backend.host()
    name, port = host.address
    fabric = backend.connect(Rendezvous(rank=0, size=1, host=name, port=port, deadline=DEADLINE))
    try:
        yield fabric
    finally:
        fabric.close()
        host.close()


@dataclass(frozen=True)
class Setting:
    """How a loop serves.

    Attributes:
        path: how weights come into slots.
        slots: of a layer that a rebalance changes; 0 where no rebalance opens.
    """

    path: str
    slots: int


@dataclass(frozen=True)
class Mode:
    """How steps come to the device.

    Attributes:
        name: in words.
        captured: whether each is a graph.
        ahead: steps that the host launches before it waits for one.
    """

    name: str
    captured: bool
    ahead: int


@dataclass(frozen=True)
class Run:
    """What some steps in a row were like.

    Attributes:
        seconds: of each step, from the end of the one before to its own.
        rebalances: that ended meanwhile.
        inside: steps whose boundary was within a rebalance.
    """

    seconds: list[float]
    rebalances: int
    inside: int


class Serving:
    """A model, an engine, and the loop that runs both."""

    def __init__(self, model: Model, library: Library, fabric: Fabric, setting: Setting) -> None:
        self._model, self._setting = model, setting
        accelerator, sizes = model.place.accelerator, model.sizes
        self._shape = ExpertShape(sizes.layers, sizes.experts, sizes.slots, sizes.ranks)
        staging = min(setting.slots + 1, sizes.here) if setting.path == STAGED else 0
        self._store = accelerator.slot_store(SlotLayout(model.slots, staging))
        self._library = library
        self._balancer = self._open_balancer(fabric)
        self._clock = model.place.clock(Role.COMPUTE)
        self._next, self._ended_count, self._looked = 0, 0, -1
        self._filled()
        self._graphs = dict(self._captured())
        model.place.settle()

    def _filled(self) -> None:
        """Slots hold what the start layout says, whatever was done with them before."""
        here, copy = self._shape.slots_per_rank, self._model.place.accelerator.stream(Role.COPY)
        slots = range(self._shape.layers * here)
        sources = [self._library.view(*divmod(slot, here)) for slot in slots]
        self._store.write(slots, sources, copy)
        self._model.place.settle()

    def _open_balancer(self, fabric: Fabric) -> ExpertBalancer:
        setting, place = self._setting, self._model.place
        config = BalancerConfig(
            name=f"cuda-{next(numbers)}",
            shares=ShareMode.STATIC,
            window_size=WINDOW,
            step_interval=WINDOW * (1 if setting.slots else NEVER),
            sub_window=WINDOW,
            layer_updates_per_iter=1,
            timeout=DEADLINE,
        )
        start = initial_placement(self._shape)
        layout = Layout(start, even_shares(start, self._shape.experts))
        context = BalancerContext(
            place.accelerator,
            fabric,
            self._store,
            config,
            self._path(),
            thread_workers(config),
            ALONE,
        )
        balancer = build(context, self._shape, layout)
        if setting.slots:
            engine: Any = balancer.engine
            # The engine, its protocol and its path run as they are; only what is planned is given.
            engine._path = FixedPlanPath(engine._path, self._shape, setting.slots, setting.path)
        return balancer

    def _path(self) -> UpdatePathConfig:
        if self._setting.path == STAGED:
            return StagedFromPeers()
        place = self._model.place
        supply = HostWeights(self._library, StreamWriter(place.accelerator, self._store))
        return InPlaceFromHost(supply, place.backend.capabilities)

    def _captured(self) -> Iterator[tuple[frozenset[int], Any]]:
        """A graph for every set of layers that a step may hold locks of, each run once before."""
        layers = range(self._shape.layers)
        kinds = {frozenset[int]()}
        if not self._model.place.backend.capabilities.graph_capture:
            return
        if self._setting.path == IN_PLACE:
            kinds |= {
                frozenset({layer - 1, layer} & set(layers)) for layer in range(len(layers) + 1)
            }
        self._launch(frozenset())
        self._clock.stream.synchronize(DEADLINE)
        for locked in sorted(kinds, key=sorted):
            graph = self._model.place.graph()
            graph.capture(self._clock.stream, lambda locked=locked: self._launch(locked))
            yield locked, graph

    def _launch(self, locked: frozenset[int]) -> None:
        """A step in which some layers are read under their locks, and everything is launched."""
        stream, locks = self._clock.stream, self._balancer.locks
        stream.launch(self._model.begin)
        for layer in range(self._shape.layers):
            if layer in locked and locks is not None:
                locks.locks[layer].acquire(stream)
            self._layer(layer)
            if layer in locked and locks is not None:
                locks.locks[layer].release(stream)
        stream.launch(self._model.fill_up)

    def _layer(self, layer: int) -> None:
        slots = self._balancer.router.route(layer, 0, self._model.ids[layer])
        self._clock.stream.launch(lambda: self._model.layer(layer, slots))

    def _forward(self, step: int, mode: Mode) -> None:
        """One step, as the engine says which locks it carries."""
        locks = self._balancer.locks
        if mode.captured:
            layers = () if locks is None else range(self._shape.layers)
            locked = frozenset(layer for layer in layers if locks and locks.is_locked(layer, step))
            self._graphs[locked].replay(self._clock.stream)
            return
        stream = self._clock.stream
        stream.launch(self._model.begin)
        for layer in range(self._shape.layers):
            with self._balancer.reading_slots(layer, step):
                self._layer(layer)
        stream.launch(self._model.fill_up)

    def run(self, steps: int, mode: Mode) -> Run:
        """So many steps, behind a few that are not told of."""
        gc.collect()
        gc.disable()
        try:
            warm, _ = self._steps(WARM, mode, [])
            ended_before = self._rebalances()
            marks, inside = self._steps(steps, mode, warm)
            marks[-1].wait()
        finally:
            gc.enable()
        seconds = [later.since(earlier) for earlier, later in pairwise(marks[-steps - 1 :])]
        return Run(seconds, self._rebalances() - ended_before, inside)

    def _steps(self, count_: int, mode: Mode, marks: Sequence[Mark]) -> tuple[list[Mark], int]:
        """Appends a mark at the end of each step; also returns how many were in a rebalance."""
        all_marks, inside = list(marks), 0
        for _ in range(count_):
            inside += self._step(mode)
            all_marks.append(self._clock.point())
            if len(all_marks) > mode.ahead:
                all_marks[-1 - mode.ahead].wait()
        return all_marks, inside

    def _step(self, mode: Mode) -> bool:
        """Launch the next one; whether its boundary was within a rebalance."""
        engine: Any = self._balancer.engine
        with self._balancer.step(self._next):
            inside = not isinstance(engine.state, Idle)
            self._forward(self._next, mode)
        self._next += 1
        return inside

    def _rebalances(self) -> int:
        """Rebalances that have ended so far. Raises `RuntimeError` where one did not end well."""
        new_reports = [
            report for report in self._balancer.engine.reports if report.step > self._looked
        ]
        for report in new_reports:
            if report.outcome not in COMPLETED:
                raise RuntimeError(f"rebalance {report.number} ended with: {report.outcome}")
            self._looked = report.step
        self._ended_count += len(new_reports)
        return self._ended_count

    def finish_rebalance(self, mode: Mode) -> None:
        """Go on until nothing is under way, and see that slots hold what the layout says.

        Raises:
            RuntimeError: they do not, or it does not come to an end.
        """
        engine: Any = self._balancer.engine
        for _ in range(64 * WINDOW):
            if not isinstance(engine.state, MOVING):
                break
            self._step(mode)
            self._clock.stream.synchronize(DEADLINE)
        else:
            raise RuntimeError(f"a rebalance does not end: {engine.state}")
        self._model.place.settle()
        self._check()

    def _check(self) -> None:
        count_, here = len(self._store.layout.slots), self._shape.slots_per_rank
        device = self._model.place.accelerator.device
        sums = torch.empty(count_, dtype=torch.int64, device=device)
        self._store.checksum_slots(range(count_), sums, self._clock.stream)
        self._clock.stream.synchronize(DEADLINE)
        placement = self._balancer.serving_state.layout.placement
        for slot, actual in enumerate(sums.tolist()):
            layer, place = divmod(slot, here)
            expected = self._library.checksum(layer, int(placement[layer, place]))
            if actual & MASK64 != expected:
                raise RuntimeError(f"layer {layer}, slot {place}: holds what it should not")

    def close(self) -> None:
        """End the engine."""
        self._balancer.close()


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
    reported_steps: int


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
    steps=200,
    reported_steps=30,
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
    reported_steps=20,
)


def measure(place: Place, sizes: Sizes) -> Figures:
    """Both dtypes, both paths as far as they are declared, all modes."""
    with group(place) as fabric:
        rows = []
        for dtype in (BFLOAT16, FLOAT8):
            rows += _dtype(place, fabric, sizes, dtype)
            gc.collect()
    return {"share": SHARE, "pairs": sizes.pairs, "left_out": left_out(place), "rows": rows}


def left_out(place: Place) -> list[str]:
    """What is not measured, for lack of what it takes."""
    reasons = []
    if IN_PLACE not in paths(place):
        reasons.append(f"{place.backend.name} declares no stream locks: no in-place path")
    if CAPTURED not in modes(place):
        reasons.append(f"{place.backend.name} captures no graphs")
    return reasons


def paths(place: Place) -> tuple[str, ...]:
    """Those that the backend declares what they take."""
    declared = place.backend.capabilities
    if declared.stream_lock and declared.copy_independent_of_launch:
        return (STAGED, IN_PLACE)
    return (STAGED,)


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
            steps = sizes.steps if mode.captured and mode.ahead else sizes.reported_steps
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
    idle_serving = Serving(model, library, fabric, Setting(path, 0))
    mode = modes(model.place)[0]
    shortest = min(idle_serving.run(WARM_UP, mode).seconds)
    idle_serving.close()
    least = int(moved_bytes(model, path, 1) / STEPS_PER_CHANGE[path] / SHARE)
    model.fill_to(model.place.clock(Role.COMPUTE), seconds, least, shortest)


def moved_bytes(model: Model, path: str, slots: int) -> int:
    """Bytes that so many slots' moves read and write in device memory."""
    slot = sum(segment.type.nbytes for segment in model.slots[0])
    return slots * slot * PASSES[path]


def slots_a_layer(model: Model, path: str) -> int:
    """As many as keep to the share while one layer after the other changes; at least one."""
    room = model.traffic * SHARE * STEPS_PER_CHANGE[path] / moved_bytes(model, path, 1)
    return max(1, min(int(room), model.sizes.here - 2))


def pairs(
    moving: Serving, still: Serving, mode: Mode, count: int, steps: int
) -> Iterator[tuple[Run, Run]]:
    """With a rebalance and without, in turns; every other pair begins without."""
    for turn in range(count):
        runs: dict[bool, Run] = {}
        for with_rebalance in (True, False) if turn % 2 == 0 else (False, True):
            serving = moving if with_rebalance else still
            runs[with_rebalance] = serving.run(steps, mode)
            serving.finish_rebalance(mode)
        yield runs[True], runs[False]


def figures(runs: Sequence[tuple[Run, Run]], model: Model, path: str, slots: int) -> Figures:
    """What the runs come to."""
    steps = sum(len(run.seconds) for run, _ in runs)
    rebalances = sum(run.rebalances for run, _ in runs)
    moved_slots = slots * model.sizes.layers * rebalances
    slot = sum(segment.type.nbytes for segment in model.slots[0])
    row: Figures = {
        "slots_a_layer": slots,
        "steps": len(runs[0][0].seconds),
        "rebalances": rebalances,
        "inside": sum(run.inside for run, _ in runs) / steps,
        "traffic": model.traffic,
        "share": moved_bytes(model, path, moved_slots) / steps / model.traffic,
        "peak_share": moved_bytes(model, path, slots) / STEPS_PER_CHANGE[path] / model.traffic,
        "delivered": moved_slots * slot / steps,
    }
    for name, part in (("median", 50), ("p99", 99)):
        ours, theirs = (
            [float(np.percentile(run[place].seconds, part)) for run in runs] for place in (0, 1)
        )
        row[name] = {"with": scaled(ours, MILLI), "without": scaled(theirs, MILLI)}
        row[f"{name}_ratio"] = spread(a / b for a, b in zip(ours, theirs, strict=True))
    row["least_ms"] = min(min(run.seconds) for pair in runs for run in pair) * MILLI
    return row
