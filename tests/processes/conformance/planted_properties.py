"""Small properties with a planted fault, played by ranks in other processes."""

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from equipoise.hal.conformance.context import Play, RankContext, require, wait_for_success
from equipoise.hal.conformance.executors.leak_detector import process_usage
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import DeadlineLength, Property, PropertyScope, Traits
from equipoise.hal.errors import Violation

VICTIM = 1
JUDGED_ANSWERS: list[list[int]] = []
"""What ranks answered, case by case, as the driver saw it."""


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    return st.builds(lambda n: make_program([Step("sum", (n,))], size=2), st.integers(1, 100))


def _sum(ctx: RankContext, program: Program) -> Play:
    """The sum, over ranks, of rank + the program's number."""
    comm = yield from ctx.communicator()
    value = torch.tensor([ctx.rank + int(program.steps[0].args[0])])
    yield from wait_for_success(ctx, comm.all_reduce(value), "the sum")
    return int(value)


def _judge_sums(program: Program, answers: Sequence[Any]) -> None:
    number = int(program.steps[0].args[0])
    expected = sum(rank + number for rank in range(program.size))
    require("X4", answers == [expected] * program.size, f"{answers} instead of {expected}")


def _one_too_many(ctx: RankContext, program: Program) -> Play:
    value = yield from _sum(ctx, program)
    return value + (ctx.rank == VICTIM and int(program.steps[0].args[0]) >= 5)


def _violate(ctx: RankContext, program: Program) -> Play:
    if ctx.rank == VICTIM:
        raise Violation("A4", "a guard band is gone")
    return (yield from _sum(ctx, program))


def _raise(ctx: RankContext, program: Program) -> Play:
    if ctx.rank == VICTIM:
        raise ValueError("rank 1 was told to")
    return (yield from _sum(ctx, program))


def _die(ctx: RankContext, program: Program) -> Play:
    if ctx.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    return (yield from _sum(ctx, program))


def _hang(ctx: RankContext, program: Program) -> Play:
    if ctx.rank == VICTIM:
        threading.Event().wait()
    return (yield from _sum(ctx, program))


def _three_hosts(ctx: RankContext, program: Program) -> Play:
    yield from ()
    return [ctx.rank, ctx.thread]


def _judge_hosts(program: Program, answers: Sequence[Any]) -> None:
    expected = [[rank, host] for rank in range(program.size) for host in range(3)]
    require("P6", answers == expected, f"{answers} instead of {expected}")


def _pid(ctx: RankContext, program: Program) -> Play:
    yield from ()
    return os.getpid()


def _threads(ctx: RankContext, program: Program) -> Play:
    yield from _sum(ctx, program)
    return process_usage().threads


def _take_down(program: Program, answers: Sequence[Any]) -> None:
    JUDGED_ANSWERS.append(list(answers))


def _leak_descriptor(ctx: RankContext, program: Program) -> Play:
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
        **{"deadline": DeadlineLength.SHORT, "judge": _judge_sums, **parts},
    )


SOUND = _planted("sound", play=_sum)
WRONG = _planted("wrong", play=_one_too_many)
VIOLATING = _planted("violating", play=_violate)
RAISING = _planted("raising", play=_raise)
DYING = _planted("dying", play=_die)
HANGING = _planted("hanging", play=_hang)
HOSTS = _planted("hosts", play=_three_hosts, judge=_judge_hosts, threads=3)
THREADS = _planted("threads", play=_threads, judge=_take_down)
PIDS = _planted("pids", play=_pid, judge=_take_down)
LEAKING = _planted(
    "leaking", play=_leak_descriptor, judge=lambda *_: None, lost_ranks=lambda _: frozenset()
)
NAMELESS = (_planted("nameless", play=_sum),)
