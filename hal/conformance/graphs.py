"""Family *kernels*: what is captured runs at the replays, and only there."""

from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand
from equipoise.hal.conformance.needs import a_graph
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.stream import Role, Stream

BASE = 4
"""Every launch appends a digit of this base to one number: it shows who ran, and when."""
MOST_CAPTURED = 3
MOST_STEPS = 6


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    """Launches to be captured, then replays and launches of the ordinary kind."""
    digit = st.integers(1, BASE - 1)
    captured = digit.map(lambda digit: Step("captured launch", (digit,)))
    launch = digit.map(lambda digit: Step("launch", (digit,)))
    inside = st.lists(captured, min_size=1, max_size=MOST_CAPTURED)
    after = st.lists(st.one_of(st.just(Step("replay")), launch), max_size=MOST_STEPS)
    return st.builds(lambda inside, after: program([*inside, *after]), inside, after)


def _append(number: Tensor, digit: int) -> None:
    number.mul_(BASE).add_(digit)


def _launch(stream: Stream, number: Tensor, steps: tuple[Step, ...]) -> None:
    for step in steps:
        stream.launch(partial(_append, number, int(step.args[0])))


def _play(bench: Bench, found: Program) -> Play:
    stream = bench.accelerator.stream(Role.COMPUTE)
    number = bench.filled((1,), 0, torch.int64)
    inside = tuple(step for step in found.steps if step.op == "captured launch")
    graph = bench.accelerator.graph()
    graph.capture(stream, partial(_launch, stream, number, inside))
    yield NEXT
    bench.drain(stream)
    demand("B7", int(number) == 0, "what was captured ran before any replay")
    due: list[Step] = []
    for step in found.steps[len(inside) :]:
        bench.disturb(stream)
        if step.op == "replay":
            graph.replay(stream)
        else:
            _launch(stream, number, (step,))
        due.extend(inside if step.op == "replay" else (step,))
        yield NEXT
    bench.drain(stream)
    wanted = [int(step.args[0]) for step in due]
    seen = _digits(int(number))
    demand("B7", seen == wanted, f"ran {seen}, not {wanted}")


def _digits(number: int) -> list[int]:
    """Most significant first."""
    return [*_digits(number // BASE), number % BASE] if number else []


GRAPHS = Property(
    name="a-graph-runs-at-its-replays-only",
    family="kernels",
    clauses=("B7",),
    claim="Capturing runs nothing; each replay runs all of it, in the order of the stream.",
    programs=_programs,
    play=_play,
    needs=a_graph,
)
