"""Family *overlap*: how much time running two streams at once saves; measured, not judged."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.context import NEXT, Play, RankContext, sync_current_stream
from equipoise.hal.conformance.fixtures import stopped_streams
from equipoise.hal.conformance.program import Program, make_program
from equipoise.hal.conformance.property import Property, Traits, concurrent_streams, holdable_stream
from equipoise.hal.stream import Role

FAMILY = "overlap"
MEASUREMENTS = 5
"""Measurements of either kind, one after the other in turn."""
MATRIX_SIDE = 256
"""Rows and columns of the matrices that the compute stream multiplies."""
COPY_BYTES = 1 << 20
"""Bytes that the copy stream copies."""


def _play_side_by_side(ctx: RankContext, program: Program) -> Play:
    return stopped_streams.play_with_stopped_streams(ctx, program, "B8", ctx.hold)


def has_clock(traits: Traits) -> bool:
    """Time that passes by itself."""
    return not traits.controlled


@dataclass(frozen=True)
class OverlapTimes:
    """Seconds, medians of `MEASUREMENTS` interleaved measurements.

    Attributes:
        sequential: a copy and a computation, one after the other.
        concurrent: the same two at once.
        spread: the largest of `concurrent` minus the smallest.
    """

    sequential: float
    concurrent: float
    spread: float


def measure_overlap(ctx: RankContext) -> OverlapTimes:
    """Copy on the copy stream and compute on the compute stream, in turn and at once (T1)."""
    here = ctx.accelerator.device
    square = torch.ones(MATRIX_SIDE, MATRIX_SIDE, device=here)
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8, device=here) for _ in range(2))
    sync_current_stream(target)
    jobs = _jobs(ctx, square, source, target)
    _time_jobs(ctx, jobs)  # the first use of everything
    pairs = [
        (_time_jobs(ctx, jobs[:1]) + _time_jobs(ctx, jobs[1:]), _time_jobs(ctx, jobs))
        for _ in range(MEASUREMENTS)
    ]
    apart, together = zip(*pairs, strict=True)
    spread = max(together) - min(together)
    return OverlapTimes(statistics.median(apart), statistics.median(together), spread)


def _jobs(
    ctx: RankContext, square: Tensor, source: Tensor, target: Tensor
) -> Sequence[Callable[[], None]]:
    compute, copy = (ctx.accelerator.stream(role) for role in (Role.COMPUTE, Role.COPY))
    product = torch.empty_like(square)
    return (
        lambda: compute.launch(lambda: torch.mm(square, square, out=product)),
        lambda: copy.launch(lambda: target.copy_(source)),
    )


def _time_jobs(ctx: RankContext, jobs: Sequence[Callable[[], None]]) -> float:
    """Seconds from the first launch to the end of all."""
    began = time.perf_counter()
    for launch in jobs:
        launch()
    ctx.drain()
    return time.perf_counter() - began


def _play_measure(ctx: RankContext, _: Program) -> Play:
    """Returns the figures; whatever they are, nothing is violated."""
    yield NEXT
    overlap = measure_overlap(ctx)
    return [overlap.sequential, overlap.concurrent, overlap.spread]


def _format_times(_: Program, answers: Sequence[Any]) -> str:
    """The figures in words."""
    apart, together, spread = (float(seconds) for seconds in answers[0])
    return (
        f"a copy and a computation at once took {together / apart:.2f} of one after the other "
        f"(spread {spread / apart:.2f})"
    )


PROPERTIES = (
    Property(
        name="declared-streams-run-side-by-side",
        family=FAMILY,
        clauses=("B8",),
        claim="While some of the declared streams are held, the others finish.",
        programs=stopped_streams.launch_and_stop_programs,
        play=_play_side_by_side,
        needs=holdable_stream,
    ),
    Property(
        name="copies-and-computation-overlap",
        family=FAMILY,
        clauses=("T1",),
        claim="Measured, never judged: a copy and a computation at once take less than in turn.",
        programs=lambda _: st.just(make_program([])),
        play=_play_measure,
        judge=_format_times,
        needs=concurrent_streams,
        applies_to=has_clock,
    ),
)
