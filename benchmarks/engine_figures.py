"""From what the ranks wrote down to the figures of `engine.py`.

A step lasts from the end of the one before on the slowest rank to its own end on the slowest rank.
Its device time is known: the emulation adds it up from the rows that really went to each rank. So
the median of the run without balancing *on the same tokens and the same placement* is that device
time plus the median of what the run without balancing takes beside its own; the stall of a step is
what it takes beyond that, where it takes more.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from emulation import RANKS, ROWS, Point
from engine_traffic import Traffic, traffic_of

Floats = npt.NDArray[np.float64]
NONE, AGAIN, PERFECT, STOP = "none", "none again", "perfect", "stop-the-world"
OURS = "boundary", "locked"
STALLS = 20.0
"""Times that the stall of stop-the-world has to be ours."""
MILLI = 1e3


@dataclass(frozen=True)
class Record:
    """One run, of all ranks.

    Attributes:
        told: what each rank wrote down.
        traffic: that was served.
    """

    told: Sequence[dict[str, Any]]
    traffic: Traffic

    @property
    def system(self) -> str:
        """Its name."""
        return str(self.told[0]["system"])

    @property
    def round(self) -> int:
        """Which."""
        return int(self.told[0]["round"])

    @cached_property
    def seconds(self) -> Floats:
        """By step."""
        ended = np.max([rank["ended"] for rank in self.told], axis=0)
        began = np.max([rank["began"] for rank in self.told], axis=0)
        before = np.concatenate([began[:1], ended[:-1]])
        freed = self.told[0]["freed"]
        before[freed] = began[freed]
        found: Floats = ended - before
        return found

    @cached_property
    def beside(self) -> Floats:
        """By step: what is not the device's time."""
        found: Floats = self.seconds - np.asarray(self.told[0]["ideal"])
        return found

    @property
    def measured(self) -> slice:
        """The steps of the load stages."""
        return slice(self.traffic.warm, self.traffic.steps)

    def stalls(self, usual: float) -> Floats:
        """By step; `usual` is what a step takes beside the device's time."""
        found: Floats = np.maximum(0.0, self.beside - usual)
        found[: self.traffic.warm] = 0.0
        return found

    @property
    def usual(self) -> float:
        """Median of what its steps take beside the device's time."""
        return float(np.median(self.beside[self.measured]))

    @property
    def rebalances(self) -> list[list[int]]:
        """The boundaries at which each was due and ended, and its copies."""
        found: list[list[int]] = self.told[0]["rebalances"]
        return found

    def steps_of(self, stage: int) -> list[int]:
        """Steps of a load stage."""
        return [step for step in range(self.traffic.steps) if self.traffic.stage(step) == stage]

    def balanced_epochs(self) -> list[int]:
        """Steps within rebalances of traffic for which the placement before was balanced, too."""
        found: list[int] = []
        for due, ended, _ in self.rebalances:
            if self.traffic.stage(due) == self.traffic.stage(due - self.traffic.interval):
                found += range(due, ended + 1)
        return found

    @property
    def rate(self) -> float:
        """Rows a second, all ranks together, in the load stages."""
        rows = sum(ROWS[self.traffic.stage(s)] for s in range(self.traffic.steps)[self.measured])
        return RANKS * rows / float(self.seconds[self.measured].sum())


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least, and most."""
    found = list(values)
    return {"median": statistics.median(found), "lowest": min(found), "highest": max(found)}


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

    def paired(self, ratio: Callable[[int], float], *systems: str) -> dict[str, float]:
        """Spread of a figure of rounds that all these systems were in."""
        turns = set.intersection(*(set(self.of(system)) for system in systems))
        return spread(ratio(turn) for turn in sorted(turns))


def system_figures(rounds: Rounds, system: str) -> dict[str, Any]:
    """The row of a table: milliseconds, and rows a second."""
    records = rounds.of(system)
    stalls = {turn: record.stalls(rounds.usual(turn)) for turn, record in records.items()}
    each = [
        float(stalls[turn][due : ended + 1].sum()) * MILLI
        for turn, record in records.items()
        for due, ended, _ in record.rebalances
    ]
    first = next(iter(records.values()))
    return {
        "rounds": len(records),
        "rebalances": len(first.rebalances),
        "copies": sum(copies for _, _, copies in first.rebalances),
        "steps": _steps(records.values()),
        "stall": {"mean": statistics.fmean(each), "min": min(each), "max": max(each)}
        if each
        else None,
        "total_stall": spread(float(found.sum()) * MILLI for found in stalls.values()),
        "stages": [_stage(records.values(), stage) for stage in range(first.traffic.stages)],
        "rate": spread(record.rate for record in records.values()),
        "cpu": spread(
            MILLI * sum(rank["cpu"] for rank in r.told) / r.traffic.steps for r in records.values()
        ),
    }


def _steps(records: Iterable[Record]) -> float:
    """Steps from where a rebalance is due to its end, mean."""
    found = [e - due + 1 for record in records for due, e, _ in record.rebalances]
    return statistics.fmean(found) if found else 0.0


def _stage(records: Iterable[Record], stage: int) -> dict[str, float]:
    """Milliseconds of a step, pooled over rounds."""
    pooled = np.concatenate([record.seconds[record.steps_of(stage)] for record in records])
    return {f"p{part}": float(np.percentile(pooled, part)) * MILLI for part in (50, 99)}


def bars(rounds: Rounds) -> dict[str, Any]:
    """What is asked of both our paths, each with its spread over rounds."""
    return {ours: _bars(rounds, ours) for ours in OURS}


def _bars(rounds: Rounds, ours: str) -> dict[str, Any]:
    return {
        "p99": rounds.paired(lambda turn: _slow(rounds, ours, turn), ours, PERFECT),
        "p99_pooled": _slow_pooled(rounds, ours),
        "stall": rounds.paired(lambda turn: _stall(rounds, ours, turn), ours, STOP, NONE),
        "throughput": rounds.paired(lambda turn: _gain(rounds, ours, turn), ours, PERFECT, NONE),
    }


def _slow(rounds: Rounds, ours: str, turn: int) -> float:
    """P99 of steps within rebalances, over that of the same steps with the placement held."""
    mine, held = rounds.of(ours)[turn], rounds.of(PERFECT)[turn]
    steps = mine.balanced_epochs()
    return _p99([mine.seconds[steps]]) / _p99([held.seconds[steps]])


def _slow_pooled(rounds: Rounds, ours: str) -> float:
    """The same with the steps of all rounds together."""
    mine, held = rounds.of(ours), rounds.of(PERFECT)
    steps = {turn: record.balanced_epochs() for turn, record in mine.items()}
    return _p99([mine[t].seconds[s] for t, s in steps.items()]) / _p99(
        [held[t].seconds[s] for t, s in steps.items()]
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


def point_figures(point: Point, told: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Everything of a point; `told` has its runs only. Raises `RuntimeError` as `check` does."""
    traffic = traffic_of(point)
    records = [Record(run, traffic) for run in told]
    check(records)
    rounds = Rounds(records)
    systems = list(dict.fromkeys(record.system for record in records))
    judged = {*OURS, PERFECT, STOP} <= set(systems)
    if judged:
        check_plans(records)
    return {
        "point": point.fields(),
        "steps": traffic.steps,
        "systems": {system: system_figures(rounds, system) for system in systems},
        "bars": bars(rounds) if judged else None,
    }


def check(records: Sequence[Record]) -> None:
    """Every run has served the same tokens, rightly, with the same layouts on all ranks.

    Raises:
        RuntimeError: one has not.
    """
    tokens = {tuple(rank["tokens"] for rank in record.told) for record in records}
    if len(tokens) != 1:
        raise RuntimeError(f"runs were given different tokens: {sorted(tokens)}")
    for record in records:
        if wrong := sum(rank["wrong"] for rank in record.told):
            raise RuntimeError(f"{record.system}: {wrong} rows or slots of another expert")
        if len({tuple(rank["layouts"]) for rank in record.told}) != 1:
            raise RuntimeError(f"{record.system}: ranks installed different layouts")


def check_plans(records: Sequence[Record]) -> None:
    """What is judged was given the same plans, and has come to the last of them.

    Raises:
        RuntimeError: one was not, or has not.
    """
    found = [record for record in records if record.system in (*OURS, PERFECT, STOP)]
    given = {tuple(record.told[0]["plans"]) for record in found}
    if len(given) != 1:
        raise RuntimeError("systems that are compared were given different plans")
    for record in found:
        if record.told[0]["layouts"][-1] != record.told[0]["plans"][-1]:
            raise RuntimeError(f"{record.system}, round {record.round}: fell behind the plans")
