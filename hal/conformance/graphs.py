"""Family *kernels*: what is captured runs at the replays, and only there."""

from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand, told
from equipoise.hal.conformance.needs import a_graph, a_held_stream, all_of, several_streams
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import StreamTimeout
from equipoise.hal.stream import Role, Stream

BASE = 4
"""Every launch appends a digit of this base to one number: it shows who ran, and when."""
MOST_CAPTURED = 3
MOST_STEPS = 6
ROLES = tuple(role.value for role in Role)[:2]


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


def _elsewhere(_: Traits) -> st.SearchStrategy[Program]:
    """`capture(role)`, then launches and replays on another stream, while the first is held."""
    roles = st.permutations(ROLES).map(lambda drawn: drawn[:2])
    after = st.lists(st.sampled_from((Step("replay"), Step("launch", (2,)))), max_size=4)
    return st.builds(
        lambda pair, steps: program(
            [Step("capture", (pair[0],)), *steps, Step("replay")], settings={"on": pair[1]}
        ),
        roles,
        after,
    )


def _play_elsewhere(bench: Bench, found: Program) -> Play:
    """First the stream that was captured is held, then the one that replays are launched on."""
    captured, *steps = found.steps
    first, second = (
        bench.accelerator.stream(Role(str(name)))
        for name in (captured.args[0], found.setting("on"))
    )
    number, graph = bench.filled((1,), 0, torch.int64), bench.accelerator.graph()
    inside = (Step("launch", (1,)), Step("launch", (3,)))
    graph.capture(first, partial(_launch, first, number, inside))
    bench.drain(first)
    let_go = bench.hold(first)
    due: list[int] = []
    for step in steps:
        if step.op == "replay":
            graph.replay(second)
        else:
            _launch(second, number, (step,))
        due += [1, 3] if step.op == "replay" else [2]
        yield NEXT
    stuck = attempt(partial(bench.drain, second), StreamTimeout)
    demand("B7", not stuck, f"a replay on {second.role} waits for {first.role}, which is held")
    seen = _digits(int(told(number)))
    demand("B7", seen == due, f"on {second.role} ran {seen}, not {due}")
    let_go()
    let_go = bench.hold(second)
    graph.replay(second)
    bench.drain(first)
    seen = _digits(int(told(number)))
    demand("B7", seen == due, f"{seen} ran, though {second.role} is held: not {due}")
    let_go()
    bench.drain()
    seen = _digits(int(told(number)))
    demand("B7", seen == [*due, 1, 3], f"in the end ran {seen}, not {[*due, 1, 3]}")


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
ELSEWHERE = Property(
    name="a-graph-replays-on-the-stream-it-is-given",
    family="kernels",
    clauses=("B7",),
    claim="A replay comes after what its stream was given, and waits for no other stream.",
    programs=_elsewhere,
    play=_play_elsewhere,
    needs=all_of(a_graph, a_held_stream, several_streams),
)
