"""Part of family *progress*: collectives whose output overlaps their input."""

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, equal, finish, settled
from equipoise.hal.conformance.collectives import Call, due, given, tame
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Ranks, Traits
from equipoise.hal.conformance.strategies import few
from equipoise.hal.conformance.traffic import call_of
from equipoise.hal.errors import Unsupported
from equipoise.hal.work import Work

FAMILY = "progress"
MOST = 3
OPS = ("all_gather", "reduce_scatter", "all_to_all")
OVERLAPS = ("same", "shifted")
"""*same*: the smaller operand is this rank's part of the larger one, or both are one.
*shifted*: the output begins one element behind the input, on no rank where it belongs."""
COUNTS = (4, 33)


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    one = st.builds(
        lambda op, count, overlap: Step(op, (count, overlap)),
        st.sampled_from(OPS),
        st.sampled_from(COUNTS),
        st.sampled_from(OVERLAPS),
    )
    drawn = st.lists(one, min_size=1, max_size=MOST)
    return st.builds(lambda size, steps: program(steps, size), few(traits), drawn)


def _play(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    for number, step in enumerate(found.steps):
        yield NEXT
        yield from _overlapping(bench, group, call_of(step, number), str(step.args[1]))


def _overlapping(bench: Bench, group: Communicator, call: Call, overlap: str) -> Play:
    """Either it equals the collective without overlap, or nothing happens."""
    values = given(call, group.rank, group.size, tame)
    wanted = due(call, group.rank, group.size, tame)
    out, tensor = _operands(bench, group.rank, values, wanted, overlap)
    settled(tensor.copy_(values))
    works: list[Work] = []
    what = f"rank {group.rank}: {call}, output and input {overlap}"
    refused = attempt(lambda: works.append(_start(group, call.op, out, tensor)), Unsupported)
    if refused is not None:
        equal("A3", tensor, values, f"{what}: the input after the refusal")
        return
    yield from finish(bench, works[0], what)
    equal("A3", out, wanted, what)


def _start(group: Communicator, op: str, out: Tensor, tensor: Tensor) -> Work:
    calls = {
        "all_gather": group.all_gather,
        "reduce_scatter": group.reduce_scatter,
        "all_to_all": group.all_to_all,
    }
    return calls[op](out, tensor)


def _operands(
    bench: Bench, rank: int, values: Tensor, wanted: Tensor, overlap: str
) -> tuple[Tensor, Tensor]:
    """Output and input of these shapes, in one piece of memory."""
    if overlap == "shifted":
        return _shifted(bench, values, wanted)
    if values.numel() > wanted.numel():
        whole = bench.empty(values.shape, values.dtype)
        return whole[rank], whole
    whole = bench.empty(wanted.shape, wanted.dtype)
    return whole, whole if values.shape == wanted.shape else whole[rank]


def _shifted(bench: Bench, values: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    whole = bench.empty((max(values.numel(), 1 + wanted.numel()),), values.dtype)
    tensor = whole[: values.numel()].view(values.shape)
    return whole[1 : 1 + wanted.numel()].view(wanted.shape), tensor


PROPERTIES = (
    Property(
        name="overlapping-operands-are-as-good-as-separate-ones-or-refused",
        family=FAMILY,
        clauses=("A3",),
        claim="A collective whose output overlaps its input gives the same, or does nothing.",
        programs=_programs,
        play=_play,
        ranks=Ranks.GROUP,
    ),
)
