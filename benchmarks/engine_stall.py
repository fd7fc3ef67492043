"""Does rebalancing cost serving anything? Four ranks on an emulated device, one process each.

    python benchmarks/engine_stall.py               all points, 5 rounds: about 50 minutes
    python benchmarks/engine_stall.py --point 'twice the link'
                                                    that point alone; nothing is kept, since
                                                    figures of different commits do not compare
    python benchmarks/engine_stall.py --quick       the centre, one round, a minute; not kept
    python benchmarks/engine_stall.py --slower 0.25 one layer each: device and links four times as
                                                    fast; nothing is kept

Compute, links and copies are emulated (`lib/emulated_device.py` has every constant); routing,
counters, votes, plans' tables, migration plans and commits are the shipped code, and every slot is
looked at in every layer of every step. What the ranks wrote down becomes figures as
docs/design/measuring-the-engine.md says. All systems serve the same tokens, and execute the same
plans over the same link:

- none: the start placement; *none again* is the other half of an A/A pair.
- perfect: the last placement of each load stage, there from its first step on.
- stop-the-world: at the step of a rebalance everybody waits for all weights of all layers.
- one layer a step: one layer in flight, a vote that everybody waits for in every step of a cycle.
- staged, in_place: ours.

In a second table, which is not judged, every system executes what its own planner says; in a third
nothing is emulated. Writes benchmarks/results/engine_stall.json; `python benchmarks/report.py`
shows it.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from lib.emulated_device import CENTRE, RANKS, ROWS, Point, points, raw
from lib.emulated_link import Board
from lib.engine_systems import Traffic, traffic_of
from lib.processes import Place, serve_on_ranks
from lib.results import save, spread
from report import show

from equipoise.hal import registry
from equipoise.hal.communicator import Rendezvous

RANK = Path(__file__).parent / "lib" / "engine_rank.py"
OPERATION_DEADLINE = 60.0
"""Seconds that an operation may take."""


@dataclass(frozen=True)
class Run:
    """One pass over the traffic."""

    point: Point
    system: str
    round: int


RankRecords = list[list[dict[str, Any]]]
"""By run, what each rank has written down."""


def serve_all(runs: Sequence[Run], seconds: float) -> RankRecords:
    """Serve every run on four processes. Raises `RuntimeError` as `serve_on_ranks` does."""
    host = registry.communicator("gloo").host()
    address, port = host.address
    try:
        with tempfile.TemporaryDirectory(prefix="equipoise-engine-") as folder:
            board = Path(folder) / "board"
            board.write_bytes(bytes(Board.size(RANKS)))
            tasks = [
                {
                    "where": asdict(
                        Rendezvous(
                            rank=rank,
                            size=RANKS,
                            host=address,
                            port=port,
                            deadline=OPERATION_DEADLINE,
                        )
                    ),
                    "board": str(board),
                    "runs": [(run.point.fields(), run.system, run.round) for run in runs],
                }
                for rank in range(RANKS)
            ]
            by_rank = serve_on_ranks(RANK, tasks, [Place()] * RANKS, seconds)
            return list(map(list, zip(*by_rank, strict=True)))
    finally:
        host.close()


Floats = npt.NDArray[np.float64]
NONE, AGAIN, PERFECT, STOP = "none", "none again", "perfect", "stop-the-world"
OURS = "staged", "in_place"
SLOW, LESS_STALL, PART = 1.05, 20.0, 0.8
"""The bars: P99 at most, times less stall at least, part of the gain at least."""
MILLI = 1e3


@dataclass(frozen=True)
class Record:
    """One run, of all ranks.

    Attributes:
        by_rank: what each rank wrote down.
        traffic: that was served.
    """

    by_rank: Sequence[dict[str, Any]]
    traffic: Traffic

    @property
    def system(self) -> str:
        """Its name."""
        return str(self.by_rank[0]["system"])

    @property
    def round(self) -> int:
        """Which."""
        return int(self.by_rank[0]["round"])

    @cached_property
    def seconds(self) -> Floats:
        """By step."""
        end_times = np.max([rank["ended"] for rank in self.by_rank], axis=0)
        start_times = np.max([rank["began"] for rank in self.by_rank], axis=0)
        before = np.concatenate([start_times[:1], end_times[:-1]])
        freed = self.by_rank[0]["freed"]
        before[freed] = start_times[freed]
        durations: Floats = end_times - before
        return durations

    @cached_property
    def overhead(self) -> Floats:
        """By step: what is not the device's time."""
        overhead: Floats = self.seconds - np.asarray(self.by_rank[0]["ideal"])
        return overhead

    @property
    def measured_steps(self) -> slice:
        """The steps of the load stages."""
        return slice(self.traffic.warm, self.traffic.steps)

    def stalls(self, usual: float) -> Floats:
        """By step; `usual` is what a step takes beside the device's time."""
        stall_seconds: Floats = np.maximum(0.0, self.overhead - usual)
        stall_seconds[: self.traffic.warm] = 0.0
        return stall_seconds

    @property
    def usual(self) -> float:
        """Median of what its steps take beside the device's time."""
        return float(np.median(self.overhead[self.measured_steps]))

    @property
    def rebalances(self) -> list[list[int]]:
        """The boundaries at which each was due and ended, and its copies."""
        rebalances: list[list[int]] = self.by_rank[0]["rebalances"]
        return rebalances

    def steps_of(self, stage: int) -> list[int]:
        """Steps of a load stage."""
        return [step for step in range(self.traffic.steps) if self.traffic.stage(step) == stage]

    def balanced_steps(self) -> list[int]:
        """Steps within rebalances of traffic for which the placement before was balanced, too."""
        steps: list[int] = []
        for due, end, _ in self.rebalances:
            if self.traffic.stage(due) == self.traffic.stage(due - self.traffic.interval):
                steps += range(due, end + 1)
        return steps

    @property
    def rate(self) -> float:
        """Rows a second, all ranks together, in the load stages."""
        rows = sum(
            ROWS[self.traffic.stage(s)] for s in range(self.traffic.steps)[self.measured_steps]
        )
        return RANKS * rows / float(self.seconds[self.measured_steps].sum())


@dataclass(frozen=True)
class Rounds:
    """All runs of a point."""

    records: Sequence[Record]

    def of(self, system: str) -> dict[int, Record]:
        """By round."""
        return {record.round: record for record in self.records if record.system == system}

    def usual(self, turn: int) -> float:
        """Of the run without balancing of a round."""
        return self.of(NONE)[turn].usual

    def paired(self, ratio: Callable[[int], float], *systems: str) -> list[float]:
        """Spread of a figure of rounds that all these systems were in."""
        turns = set.intersection(*(set(self.of(system)) for system in systems))
        return spread(ratio(turn) for turn in sorted(turns))


def system_figures(rounds: Rounds, system: str) -> dict[str, Any]:
    """The row of a table: milliseconds, and rows a second."""
    records = rounds.of(system)
    stalls = {turn: record.stalls(rounds.usual(turn)) for turn, record in records.items()}
    each = [
        float(stalls[turn][due : end + 1].sum()) * MILLI
        for turn, record in records.items()
        for due, end, _ in record.rebalances
    ]
    first_record = next(iter(records.values()))
    return {
        "rebalances": len(first_record.rebalances),
        "copies": sum(copies for _, _, copies in first_record.rebalances),
        "steps": _steps(records.values()) if each else None,
        "stall": [statistics.fmean(each), min(each), max(each)] if each else None,
        "total": spread(float(step_stalls.sum()) * MILLI for step_stalls in stalls.values()),
        **{
            f"stage_{stage + 1}": _stage(records.values(), stage)
            for stage in range(first_record.traffic.stages)
        },
        "rate": spread(record.rate for record in records.values()),
        "cpu": statistics.median(
            MILLI * sum(rank["cpu"] for rank in r.by_rank) / r.traffic.steps
            for r in records.values()
        ),
    }


def _steps(records: Iterable[Record]) -> float:
    """Steps from where a rebalance is due to its end, mean."""
    lengths = [e - due + 1 for record in records for due, e, _ in record.rebalances]
    return statistics.fmean(lengths) if lengths else 0.0


def _stage(records: Iterable[Record], stage: int) -> list[float]:
    """P50 and P99 of a step, milliseconds, pooled over rounds."""
    pooled = np.concatenate([record.seconds[record.steps_of(stage)] for record in records])
    return [float(np.percentile(pooled, part)) * MILLI for part in (50, 99)]


def bars(rounds: Rounds) -> dict[str, Any]:
    """What is asked of both our paths, each with its spread over rounds."""
    return {ours: _bars(rounds, ours) for ours in OURS}


def _bars(rounds: Rounds, ours: str) -> dict[str, Any]:
    return {
        "p99": rounds.paired(lambda turn: _slow(rounds, ours, turn), ours, PERFECT),
        "p99_pooled": _slow_pooled(rounds, ours),
        "stall": rounds.paired(lambda turn: _stall(rounds, ours, turn), ours, STOP, NONE),
        "gain": rounds.paired(lambda turn: _gain(rounds, ours, turn), ours, PERFECT, NONE),
    }


def _slow(rounds: Rounds, ours: str, turn: int) -> float:
    """P99 of steps within rebalances, over that of the same steps with the placement held."""
    mine, perfect = rounds.of(ours)[turn], rounds.of(PERFECT)[turn]
    steps = mine.balanced_steps()
    return _p99([mine.seconds[steps]]) / _p99([perfect.seconds[steps]])


def _slow_pooled(rounds: Rounds, ours: str) -> float:
    """The same with the steps of all rounds together."""
    mine, perfect = rounds.of(ours), rounds.of(PERFECT)
    steps = {turn: record.balanced_steps() for turn, record in mine.items()}
    return _p99([mine[t].seconds[s] for t, s in steps.items()]) / _p99(
        [perfect[t].seconds[s] for t, s in steps.items()]
    )


def _p99(parts: Sequence[Floats]) -> float:
    return float(np.percentile(np.concatenate(parts), 99))


def _stall(rounds: Rounds, ours: str, turn: int) -> float:
    """How many times that of stop-the-world is ours, in all steps of the load stages."""
    usual = rounds.usual(turn)
    stop, mine = (rounds.of(system)[turn].stalls(usual).sum() for system in (STOP, ours))
    return float(stop / mine) if mine else float("inf")


def _gain(rounds: Rounds, ours: str, turn: int) -> float:
    """Part of what a perfect placement gains."""
    none, mine, perfect = (rounds.of(system)[turn].rate for system in (NONE, ours, PERFECT))
    return (mine - none) / (perfect - none)


def point_figures(point: Point, runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Everything of a point; `runs`: of this point only. Raises `RuntimeError` as `check` does."""
    traffic = traffic_of(point)
    records = [Record(run, traffic) for run in runs]
    check(records)
    rounds = Rounds(records)
    systems = list(dict.fromkeys(record.system for record in records))
    has_bars = {*OURS, PERFECT, STOP} <= set(systems)
    if has_bars:
        check_plans(records)
    return {
        "point": point.fields(),
        "steps": traffic.steps,
        "systems": {system: system_figures(rounds, system) for system in systems},
        "bars": bars(rounds) if has_bars else None,
    }


def check(records: Sequence[Record]) -> None:
    """Every run has served the same tokens, rightly, with the same layouts on all ranks.

    Raises:
        RuntimeError: one has not.
    """
    tokens = {tuple(rank["tokens"] for rank in record.by_rank) for record in records}
    if len(tokens) != 1:
        raise RuntimeError(f"runs were given different tokens: {sorted(tokens)}")
    for record in records:
        if wrong := sum(rank["wrong"] for rank in record.by_rank):
            raise RuntimeError(f"{record.system}: {wrong} rows or slots of another expert")
        if len({tuple(rank["layouts"]) for rank in record.by_rank}) != 1:
            raise RuntimeError(f"{record.system}: ranks installed different layouts")


def check_plans(records: Sequence[Record]) -> None:
    """What is judged was given the same plans, and has come to the last of them.

    Raises:
        RuntimeError: one was not, or has not.
    """
    compared = [record for record in records if record.system in (*OURS, PERFECT, STOP)]
    plans = {tuple(record.by_rank[0]["plans"]) for record in compared}
    if len(plans) != 1:
        raise RuntimeError("systems that are compared were given different plans")
    for record in compared:
        if record.by_rank[0]["layouts"][-1] != record.by_rank[0]["plans"][-1]:
            raise RuntimeError(f"{record.system}, round {record.round}: fell behind the plans")


ROUNDS, FEWER = 5, 3
"""Of what is judged, and of what is not."""
JUDGED_SYSTEMS = NONE, PERFECT, STOP, *OURS
BESIDE = AGAIN, "one layer a step"
OWN = "stop-the-world, greedy", "one layer a step, greedy", "staged, own", "in_place, own"
RAW = NONE, AGAIN, STOP, "one layer a step", *OURS
"""Without the perfect placement, so that nothing is judged."""
UNEMULATED = "raw"
TITLES = {
    "centre": "The centre: all execute the same plans",
    "own": "Every system with its own planner, not judged: `incremental` and lagged shares for "
    "ours, greedy plans made anew for the others",
    "raw": "Nothing emulated, not judged: what the processes of this machine do, four ranks on its "
    "cores",
}
Figures = dict[str, Any]
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
    runs = [Run(small, system, 0) for system in (*JUDGED_SYSTEMS, *BESIDE)]
    return [*runs, *(Run(unemulated, system, 0) for system in RAW)]


def schedule(names: Sequence[str]) -> list[Run]:
    """Every run of these points, in order: rounds in which all systems take turns."""
    runs = []
    for point in (point for point in points() if point.name in names):
        for turn in range(ROUNDS):
            systems = (*JUDGED_SYSTEMS, *BESIDE) if point == CENTRE else JUDGED_SYSTEMS
            own = OWN if point == CENTRE and turn < FEWER else ()
            runs += [Run(point, system, turn) for system in (*systems, *own)]
    if UNEMULATED in names:
        unemulated = raw(replace(CENTRE, stages=1))
        runs += [Run(unemulated, s, turn) for turn in range(FEWER) for s in RAW]
    return runs


def measure(runs: Sequence[Run], times: float) -> dict[str, Any]:
    """Serve all runs, on a device that is so many times slower; figures by point."""
    steps = sum(traffic_of(run.point).steps for run in runs)
    records = serve_all(runs, SECONDS * max(times, 1.0) * steps)
    by_point = {run.point.name: run.point for run in runs}
    return {
        name: point_figures(
            point, [t for run, t in zip(runs, records, strict=True) if run.point.name == name]
        )
        for name, point in by_point.items()
    }


def missed(bars: Figures) -> list[str]:
    """Which bars a path misses at a point, by medians; a figure that is no number meets none."""
    checks = {
        "P99": bars["p99"][0] <= SLOW,
        "stall": bars["stall"][0] >= LESS_STALL,
        "throughput": bars["gain"][0] >= PART,
    }
    return [name for name, passed in checks.items() if not passed]


def figures_of(measurements: Figures) -> tuple[Figures, dict[str, list[Figures]]]:
    """Bars of both paths, and the tables: points, and systems where more than bars is told."""
    points_, systems, failures = [], [], {path: [] for path in OURS}
    for name, point in measurements.items():
        for path, each in (point["bars"] or {}).items():
            wrong = missed(each)
            failures[path] += [f"{name}: {', '.join(wrong)}"] if wrong else []
            verdict = f"**no**: {', '.join(wrong)}" if wrong else "yes"
            points_.append({"point": name, "path": path, **each, "met": verdict})
        if name not in (CENTRE.name, UNEMULATED):
            continue
        for system, row in point["systems"].items():
            own = system.endswith((", own", ", greedy"))
            plans = TITLES["own" if own else name]
            systems.append({"plans": plans, "system": system, **row})
    point_count = sum(point["path"] == OURS[0] for point in points_)
    verdicts = {
        path: {"value": "; ".join(messages) or f"none of {point_count} points", "met": not messages}
        for path, messages in failures.items()
    }
    return verdicts if points_ else {}, {"points": points_, "systems": systems}


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of one point; not kept")
    parser.add_argument("--point", action="append", choices=ALL, help="only this; may be repeated")
    parser.add_argument("--slower", type=float, default=1.0, help="device and links, so many times")
    options = parser.parse_args()
    runs = brief() if options.quick else schedule(options.point or ALL)
    figures, tables = figures_of(measure(slower(runs, options.slower), options.slower))
    show("engine_stall", figures, tables)
    if not options.quick and not options.point and options.slower == 1.0:
        save("engine_stall", ["python", "benchmarks/engine_stall.py"], figures, tables)


if __name__ == "__main__":
    main()
