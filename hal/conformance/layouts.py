"""Part of family *shapes*: operands that are not contiguous."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand, told
from equipoise.hal.conformance.collectives import (
    IN_PLACE,
    MOVES,
    PROBE,
    SUMS,
    Call,
    Flight,
    Plain,
    Values,
    calls_of,
    expect,
    fly,
    start,
    tame,
)
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Ranks, Traits
from equipoise.hal.conformance.strategies import by_size, calling, common
from equipoise.hal.errors import Unsupported

CONTIGUOUS = "contiguous"
KINDS = ("offset", "transposed", "strided", "expanded")
OPS = tuple(op for op in (*MOVES, *SUMS) if op != "exchange")
"""A round carries blobs, which are contiguous by definition."""
MOST_CALLS = 3
AHEAD = 16
"""Elements before an offset view: addresses off the alignment have a property of their own."""
UNTOUCHED = 0x01  # of every byte; also a legal truth value


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    shapes = st.sampled_from(("2x2", "2x3", "3x2"))
    laid = st.tuples(st.sampled_from(KINDS), st.sampled_from(("input", "output")))

    def sized(size: int) -> st.SearchStrategy[Program]:
        one = st.builds(_step, calling(traits, shapes, OPS), laid)
        drawn = st.lists(one, min_size=1, max_size=MOST_CALLS)
        return drawn.map(lambda steps: program(filter(_possible, steps), size))

    return by_size(common(traits), sized)


def _step(call: Step, laid: tuple[str, str]) -> Step:
    """Two more arguments: which layout, and of which operand."""
    return Step(call.op, (*call.args, *laid))


def _possible(step: Step) -> bool:
    """In-place has one operand; nothing can arrive right where several elements are one."""
    kind, which = step.args[3:]
    if step.op in IN_PLACE:
        return which == "input" and kind != "expanded"
    return kind != "expanded" or which == "input"


def level(call: Call, giver: int, taker: int) -> Tensor:
    """Values whose rows are all the same one, as in an expanded operand."""
    return tame(call, giver, taker)[:1].expand(call.shape)


@dataclass
class Laid:
    """Operands of one call, one of which may lie in a layout, and what they held at first.

    They are laid out on the host, and brought to the device as they lie, gaps included: so no
    device has to copy between layouts, which it may not be able to do for every dtype.

    Attributes:
        kind: one of `KINDS`, or `CONTIGUOUS`.
        which: input or output.
        before: the memory of each operand, uint8, and what it held at first, on the host.
    """

    bench: Bench
    kind: str
    which: str
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def of(self, values: Tensor) -> Tensor:
        """Device memory with a copy of `values`."""
        kind, shape = self._kind("input"), tuple(values.shape)
        flat = _flat(kind, shape, values.dtype)
        made = _view(flat, kind, shape)
        if kind == "expanded":
            made[..., :1, :].copy_(values[..., :1, :])
        else:
            made.copy_(values)
        return self._brought(flat, kind, shape)

    def out(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory for a result."""
        kind = self._kind("output")
        return self._brought(_flat(kind, tuple(shape), dtype), kind, tuple(shape))

    def untouched(self) -> bool:
        """Whether every operand is as it was made, and what lies between its elements too."""
        return all(torch.equal(told(now), was) for now, was in self.before)

    def _kind(self, which: str) -> str:
        return self.kind if which == self.which else CONTIGUOUS

    def _brought(self, flat: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
        data = flat.view(torch.uint8)
        made = self.bench.of(data)
        self.before.append((made, data))
        return _view(made.view(flat.dtype), kind, shape)


def _flat(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for that shape in that layout, on the host: as many elements as it needs."""
    counts = {"strided": 2 * torch.Size(shape).numel(), "offset": AHEAD + torch.Size(shape).numel()}
    count = counts.get(kind, torch.Size(shape).numel())
    if kind == "expanded":
        count //= shape[-2]
    return torch.full((count * dtype.itemsize,), UNTOUCHED, dtype=torch.uint8).view(dtype)


def _view(flat: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The operand of that shape in the memory that `_flat` made for it."""
    if kind == CONTIGUOUS:
        return flat.view(shape)
    if kind == "offset":
        return flat[AHEAD:].view(shape)
    if kind == "strided":
        return flat.view(*shape, 2)[..., 0]
    *lead, rows, columns = shape
    if kind == "transposed":
        return flat.view(*lead, columns, rows).transpose(-1, -2)
    return flat.view(*lead, 1, columns).expand(shape)


@dataclass(frozen=True)
class _Attempt:
    """A call on laid operands: its flight, or none when it was rejected."""

    call: Call
    operands: Laid
    flight: Flight | None


def _attempt(bench: Bench, group: Communicator, call: Call, step: Step) -> _Attempt:
    operands = Laid(bench, str(step.args[3]), str(step.args[4]))
    try:
        return _Attempt(call, operands, start(group, call, operands, _values(operands)))
    except Unsupported:
        return _Attempt(call, operands, None)


def _values(operands: Laid) -> Values:
    return level if operands.kind == "expanded" else tame


def _play(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    tried = []
    for call, step in zip(calls_of(found), found.steps, strict=True):
        tried.append(_attempt(bench, group, call, step))
        yield NEXT
    probes = yield from fly(bench, group, [PROBE], Plain(bench))
    expect("S2", group, probes)
    for one in tried:
        if one.flight is not None:
            yield from one.flight.land(bench)
            expect("S2", group, [one.flight], _values(one.operands))
        where = f"rank {group.rank}: {one.operands.which} {one.operands.kind}, {one.call}"
        kept = one.flight is not None or one.operands.untouched()
        demand("S2", kept, f"{where}: rejected, but its operands changed")
    return [one.flight is not None for one in tried]


def _judge(found: Program, answers: Sequence[Any]) -> None:
    for rank, answer in enumerate(answers):
        what = f"rank {rank} took layouts {answer}, rank 0 took {answers[0]} of {found.lines()}"
        demand("S2", answer == answers[0], what)


LAYOUTS = (
    Property(
        name="layouts-are-copied-right-or-rejected",
        family="shapes",
        clauses=("S2",),
        claim="Operands that are not contiguous arrive right, or are refused without a trace.",
        programs=_programs,
        play=_play,
        judge=_judge,
        ranks=Ranks.GROUP,
    ),
)
