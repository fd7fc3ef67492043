"""Small properties with something planted in them, played by ranks in other processes."""

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from equipoise.hal.conformance.context import Play, RankContext, require, wait_for_success
from equipoise.hal.conformance.executors.leak_detector import process_usage
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import DeadlineLength, Property, PropertyScope, Traits
from equipoise.hal.errors import Violation

VICTIM = 1
SEEN: list[list[int]] = []
"""What ranks answered, case by case, as the driver saw it."""


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    return st.builds(lambda n: program([Step("sum", (n,))], size=2), st.integers(1, 100))


def _sum(bench: RankContext, found: Program) -> Play:
    """The sum, over ranks, of rank + the program's number."""
    group = yield from bench.communicator()
    value = torch.tensor([bench.rank + int(found.steps[0].args[0])])
    yield from wait_for_success(bench, group.all_reduce(value), "the sum")
    return int(value)


def _judge_sums(found: Program, answers: Sequence[Any]) -> None:
    number = int(found.steps[0].args[0])
    due = sum(rank + number for rank in range(found.size))
    require("X4", answers == [due] * found.size, f"{answers} instead of {due}")


def _one_too_many(bench: RankContext, found: Program) -> Play:
    value = yield from _sum(bench, found)
    return value + (bench.rank == VICTIM and int(found.steps[0].args[0]) >= 5)


def _violate(bench: RankContext, found: Program) -> Play:
    if bench.rank == VICTIM:
        raise Violation("A4", "a guard band is gone")
    return (yield from _sum(bench, found))


def _raise(bench: RankContext, found: Program) -> Play:
    if bench.rank == VICTIM:
        raise ValueError("rank 1 was told to")
    return (yield from _sum(bench, found))


def _die(bench: RankContext, found: Program) -> Play:
    if bench.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    return (yield from _sum(bench, found))


def _hang(bench: RankContext, found: Program) -> Play:
    if bench.rank == VICTIM:
        threading.Event().wait()
    return (yield from _sum(bench, found))


def _three_hosts(bench: RankContext, found: Program) -> Play:
    yield from ()
    return [bench.rank, bench.thread]


def _judge_hosts(found: Program, answers: Sequence[Any]) -> None:
    due = [[rank, host] for rank in range(found.size) for host in range(3)]
    require("P6", answers == due, f"{answers} instead of {due}")


def _pid(bench: RankContext, found: Program) -> Play:
    yield from ()
    return os.getpid()


def _threads(bench: RankContext, found: Program) -> Play:
    yield from _sum(bench, found)
    return process_usage().threads


def _take_down(found: Program, answers: Sequence[Any]) -> None:
    SEEN.append(list(answers))


def _kept(bench: RankContext, found: Program) -> Play:
    """Leaves descriptors behind."""
    yield from ()
    os.dup(0)


def _planted(name: str, **parts: Any) -> Property:
    return Property(
        name=name,
        family="progress",
        clauses=("X4",),
        claim="The sum is right.",
        programs=_programs,
        scope=PropertyScope.GROUP,
        **{"pace": DeadlineLength.SHORT, "judge": _judge_sums, **parts},
    )


SOUND = _planted("sound", play=_sum)
WRONG = _planted("wrong", play=_one_too_many)
VIOLATING = _planted("violating", play=_violate)
RAISING = _planted("raising", play=_raise)
DYING = _planted("dying", play=_die)
HANGING = _planted("hanging", play=_hang)
HOSTS = _planted("hosts", play=_three_hosts, judge=_judge_hosts, hosts=3)
THREADS = _planted("threads", play=_threads, judge=_take_down)
PIDS = _planted("pids", play=_pid, judge=_take_down)
LEAKING = _planted("leaking", play=_kept, judge=lambda *_: None, loses=lambda _: frozenset())
NAMELESS = (_planted("nameless", play=_sum),)
