"""Does rebalancing cost serving anything? Four ranks on an emulated device, one process each.

    python benchmarks/engine.py                all points, 5 rounds: about 50 minutes
    python benchmarks/engine.py --point 'twice the link'   that point alone: nothing is kept, since
                                               figures of different commits say nothing together
    python benchmarks/engine.py --quick        the centre, one round, a minute: nothing is kept
    python benchmarks/engine.py --slower 0.25  one layer each: device and links four times as fast;
                                               nothing is kept

Compute, links and copies are emulated (`emulation.py` has every constant, `emulated_device.py` what
it does and does not stand for); routing, counters, votes, plans' tables, shipments and commits are
the shipped code, and every slot is looked at in every layer of every step. All systems serve the
same tokens, and execute the same plans over the same link:

- none: the start placement; *none again* is the other half of an A/A pair.
- perfect: the last placement of each load stage, there from its first step on.
- stop-the-world: at the step of a rebalance everybody waits for all weights of all layers.
- one layer a step: one layer in flight, a vote that everybody waits for in every step of a cycle.
- boundary, locked: ours.

In a second table, which is not judged, every system executes what its own planner says; in a third
nothing is emulated. Writes benchmarks/results/engine.json; `python benchmarks/performance.py` shows
it.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from emulation import CENTRE, points, raw
from engine_crew import Run, serve_all
from engine_figures import AGAIN, NONE, OURS, PERFECT, STOP, point_figures
from engine_page import text
from engine_traffic import traffic_of
from evidence import save

ROUNDS, FEWER = 5, 3
"""Of what is judged, and of what is not."""
JUDGED = NONE, PERFECT, STOP, *OURS
BESIDE = AGAIN, "one layer a step"
OWN = "stop-the-world, greedy", "one layer a step, greedy", "boundary, own", "locked, own"
RAW = NONE, AGAIN, STOP, "one layer a step", *OURS
"""Without the perfect placement, so that nothing is judged."""
UNEMULATED = "raw"
ALL = (*(point.name for point in points()), UNEMULATED)
SECONDS = 0.2
"""Of a step at most, stalls included, on a machine that has other things to do."""


def slower(runs: Sequence[Run], times: float) -> list[Run]:
    """The same on a slower device; what is not emulated is not changed by it."""
    return [replace(run, point=run.point.slower(times)) for run in runs]


def brief() -> list[Run]:
    """A round at the centre, and one without emulation."""
    small = replace(CENTRE, stages=1)
    unemulated = raw(small)
    runs = [Run(small, system, 0) for system in (*JUDGED, *BESIDE)]
    return [*runs, *(Run(unemulated, system, 0) for system in RAW)]


def schedule(names: Sequence[str]) -> list[Run]:
    """Every run of these points, in order: rounds in which all systems take turns."""
    runs = []
    for point in (point for point in points() if point.name in names):
        for turn in range(ROUNDS):
            named = (*JUDGED, *BESIDE) if point == CENTRE else JUDGED
            own = OWN if point == CENTRE and turn < FEWER else ()
            runs += [Run(point, system, turn) for system in (*named, *own)]
    if UNEMULATED in names:
        unemulated = raw(replace(CENTRE, stages=1))
        runs += [Run(unemulated, s, turn) for turn in range(FEWER) for s in RAW]
    return runs


def measure(runs: Sequence[Run], times: float) -> dict[str, Any]:
    """Serve all runs, on a device that is so many times slower; figures by point."""
    steps = sum(traffic_of(run.point).steps for run in runs)
    told = serve_all(runs, SECONDS * max(times, 1.0) * steps)
    by_point = {run.point.name: run.point for run in runs}
    return {
        name: point_figures(
            point, [t for run, t in zip(runs, told, strict=True) if run.point.name == name]
        )
        for name, point in by_point.items()
    }


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of one point; not kept")
    parser.add_argument("--point", action="append", choices=ALL, help="only this; may be repeated")
    parser.add_argument("--slower", type=float, default=1.0, help="device and links, so many times")
    chosen = parser.parse_args()
    runs = brief() if chosen.quick else schedule(chosen.point or ALL)
    figures = measure(slower(runs, chosen.slower), chosen.slower)
    sys.stdout.write("\n".join(text(figures)) + "\n")
    if not chosen.quick and not chosen.point and chosen.slower == 1.0:
        save("engine", ["python", "benchmarks/engine.py"], figures)


if __name__ == "__main__":
    main()
