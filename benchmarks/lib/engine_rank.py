"""One rank of `engine_stall.py`, as a process: serves every run in turn, and writes down when.

A run is a point, a system and a round. Told what to do on standard input, in JSON; writes a line of
JSON for each run.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from equipoise.balancer.experts.config import ShareMode
from equipoise.balancer.experts.placement import Layout
from equipoise.hal import registry
from equipoise.hal.communicator import Fabric, Rendezvous
from equipoise.hal.errors import GenerationMismatch
from equipoise.hal.stream import Role
from lib.emulated_device import Clock, Emulated, Point, now, prompt_timers
from lib.emulated_link import Board, Link, LinkedFabric
from lib.engine_systems import (
    DEADLINE,
    PER_RANK,
    SHAPE,
    Base,
    Ids,
    OneLayer,
    Ours,
    Perfect,
    Place,
    PlannedRebalance,
    StopTheWorld,
    System,
    Traffic,
    as_today,
    common,
    digest,
    in_place_from_host,
    planned_rebalances,
    staged_from_peers,
    traffic_of,
    weights,
)

SYSTEMS: dict[str, Callable[[Place, Traffic], System]] = {
    "none": lambda place, traffic: Base(place),
    "none again": lambda place, traffic: Base(place),
    "perfect": lambda place, traffic: Perfect(place, traffic.switches),
    "stop-the-world": lambda place, traffic: StopTheWorld(place),
    "one layer a step": lambda place, traffic: OneLayer(place),
    "staged": lambda place, traffic: Ours(place, staged_from_peers),
    "in_place": lambda place, traffic: Ours(place, in_place_from_host),
    "stop-the-world, greedy": lambda place, traffic: StopTheWorld(place),
    "one layer a step, greedy": lambda place, traffic: OneLayer(place),
    "staged, own": lambda place, traffic: Ours(
        place, staged_from_peers, ShareMode.LAGGED, own=True
    ),
    "in_place, own": lambda place, traffic: Ours(
        place, in_place_from_host, ShareMode.LAGGED, own=True
    ),
}
"""By name. Those with `greedy` execute what today's systems plan, `own` plans itself."""


LOOK = 0.7
"""Part of the time that no layer is shorter than, after which ranks look who has come."""


@dataclass(frozen=True)
class Material:
    """What a point's runs share.

    Attributes:
        traffic: of the point.
        ids: this rank's, by step.
        plans: that every system executes.
        today: that other systems would plan.
    """

    traffic: Traffic
    ids: list[Ids]
    plans: tuple[PlannedRebalance, ...]
    today: tuple[PlannedRebalance, ...]

    @staticmethod
    def of(point: Point, rank: int) -> "Material":
        """The same on every rank but for the tokens."""
        traffic = traffic_of(point)
        ids = [traffic.ids(step, rank) for step in range(traffic.steps)]
        plans, today = (
            tuple(planned_rebalances(traffic, planner)) for planner in (common, as_today)
        )
        return Material(traffic, ids, plans, today)


@dataclass(frozen=True)
class LayerObservation:
    """What the compute stream found in a layer of a step; looked at when the run is over.

    Attributes:
        layer: which.
        row: int32 [rows], the expert that each asks for.
        assigned: int32 [rows], the slot that it was sent to.
        placement: int32 [slots], the experts that the installed placement promises.
        contents: int64 [slots of the rank, 2], what its slots hold: layer and expert.
    """

    layer: int
    row: Ids
    assigned: Ids
    placement: Ids
    contents: npt.NDArray[np.int64]

    def wrong(self, mine: slice) -> int:
        """How many rows and slots."""
        of_layer = self.contents[:, 0] == self.layer
        as_promised = self.contents[:, 1] == self.placement[mine]
        return int(
            (self.placement[self.assigned] != self.row).sum() + (~(of_layer & as_promised)).sum()
        )


class Loop:
    """Serves one run.

    Args:
        system: the way to serve.
        clock: of the compute stream.
        place: where.
        board: where the ranks meet.
        material: what is served.
    """

    def __init__(self, system: System, place: Place, board: Board, material: Material) -> None:
        self._system = system
        self._place = place
        self._board = board
        self._material = material
        self._clock: Clock = place.device.compute
        self._compute = place.device.stream(Role.COMPUTE)
        self._point = place.device.point
        self._mine = slice(place.rank * PER_RANK, (place.rank + 1) * PER_RANK)
        steps = material.traffic.steps
        self.start_times, self.end_times, self.ideal = (np.zeros(steps) for _ in range(3))
        self.freed: list[int] = []
        self.layouts: list[Layout] = []
        self._observations: list[LayerObservation] = []
        self.cpu = 0.0

    def run(self) -> None:
        """Every step."""
        cpu_start = time.process_time()
        for step, ids in enumerate(self._material.ids):
            if self._system.free(step):
                self.freed.append(step)
                self._meet_between_steps()
            self.start_times[step] = now()
            self._system.boundary(step)
            for layer, row in enumerate(ids):
                self._launch(step, layer, row)
            self._system.launched()
            self._compute.synchronize(DEADLINE)
            self.end_times[step] = now()
            self._note()
        self.cpu = time.process_time() - cpu_start

    def _launch(self, step: int, layer: int, row: Ids) -> None:
        """Route this rank's rows, and compute what all ranks send here."""
        expert_ids = torch.from_numpy(row).view(-1, 1)
        slots = self._system.router.route(layer, step, expert_ids)
        program = partial(
            self._layer, step, layer, row, slots, self._system.installed.layout.placement[layer]
        )
        with self._system.reading(layer, step):
            self._compute.launch(partial(program, now()))

    def _layer(
        self, step: int, layer: int, row: Ids, slots: torch.Tensor, placement: Ids, launched: float
    ) -> None:
        """On the compute stream: dispatch, experts, combine."""
        assigned = slots.numpy().ravel()
        rows = np.bincount(assigned // PER_RANK, minlength=SHAPE.ranks)
        generation = self._system.installed.generation(layer)
        start = max(self._clock.free, launched)
        look = start + LOOK * self._point.fixed
        meeting = self._board.meet(start, rows, generation, look)
        if (meeting.generations != generation).any():
            raise GenerationMismatch(f"step {step}, layer {layer}: {meeting.generations.tolist()}")
        took = self._point.fixed + self._point.row * int(meeting.rows.max())
        self.ideal[step] += took
        self._clock.not_before(meeting.start)
        self._clock.spend(took)
        self._observations.append(
            LayerObservation(
                layer, row, assigned, placement, self._system.slot_contents[layer].numpy().copy()
            )
        )

    def wrong(self) -> int:
        """Rows that were sent to a slot of another expert, and slots that held another."""
        return sum(observation.wrong(self._mine) for observation in self._observations)

    def _meet_between_steps(self) -> None:
        """So that no rank begins a step while another still installs for nothing."""
        zeros = np.zeros(SHAPE.ranks, dtype=np.int64)
        self._board.meet(0.0, zeros, 0)

    def _note(self) -> None:
        """Remember what was installed."""
        layout = self._system.installed.layout
        if not self.layouts or self.layouts[-1] is not layout:
            self.layouts.append(layout)


def serve(task: dict[str, Any], output: IO[str]) -> None:
    """Every run of a task; a line for each."""
    torch.set_num_threads(1)
    prompt_timers()
    fabric = registry.communicator("gloo").connect(Rendezvous(**task["where"]))
    rank = fabric.control.rank
    board = Board(Path(task["board"]), rank, SHAPE.ranks, DEADLINE)
    materials: dict[str, Material] = {}
    for number, (fields, name, turn) in enumerate(task["runs"]):
        point = Point(**fields)
        if point.name not in materials:
            materials = {point.name: Material.of(point, rank)}  # the last point's only
        figures = _run(fabric, board, materials[point.name], point, name, f"run{number}")
        output.write(
            json.dumps({"point": point.name, "system": name, "round": turn, **figures}) + "\n"
        )
        output.flush()
    fabric.open("over").barrier().result(DEADLINE)
    fabric.close()


def _run(
    fabric: Fabric, board: Board, material: Material, point: Point, name: str, label: str
) -> dict[str, Any]:
    rows = weights()
    linked = LinkedFabric(fabric, Link(point, rows[0, 0].nbytes))
    inner = registry.accelerator("cpu").open(0)
    plans = material.today if name.endswith("greedy") else material.plans
    place = Place(Emulated(inner, point), linked, fabric.control.rank, label, rows, plans)
    system = SYSTEMS[name](place, material.traffic)
    loop = Loop(system, place, board, material)
    gc.collect()
    gc.freeze()
    linked.open(f"{label}.start").barrier().result(DEADLINE)
    try:
        loop.run()
        linked.open(f"{label}.end").barrier().result(DEADLINE)
    finally:
        gc.unfreeze()
        system.close()
        linked.part()
        inner.close()
    return _run_figures(loop, system, material, plans)


def _run_figures(
    loop: Loop, system: System, material: Material, plans: Sequence[PlannedRebalance]
) -> dict[str, Any]:
    return {
        "began": loop.start_times.tolist(),
        "ended": loop.end_times.tolist(),
        "ideal": loop.ideal.tolist(),
        "wrong": loop.wrong(),
        "freed": loop.freed,
        "layouts": [layout.digest for layout in loop.layouts],
        "cpu": loop.cpu,
        "tokens": digest(material.ids),
        "plans": [plan.layout.digest for plan in plans],
        "rebalances": [[e.due, e.step, e.copies] for e in system.rebalances],
    }


def main() -> None:
    """Serve what standard input says, into the file that it names."""
    task = json.loads(sys.stdin.readline())
    with Path(task["told"]).open("w") as output:
        serve(task, output)


if __name__ == "__main__":
    main()
