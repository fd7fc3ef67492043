"""Part of family *shapes*: what cannot be done is refused at the call, without a trace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from equipoise.hal.communicator import Communicator, Exchange, Parcel
from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand
from equipoise.hal.conformance.collectives import (
    MOVES,
    PROBE,
    SUMS,
    Call,
    Plain,
    dtype_of,
    expect,
    fly,
    name_of,
    start,
)
from equipoise.hal.conformance.layouts import CONTIGUOUS, Laid
from equipoise.hal.conformance.program import Argument, Program, Step, program
from equipoise.hal.conformance.property import Property, Ranks, Traits
from equipoise.hal.conformance.strategies import few, movable
from equipoise.hal.errors import Unsupported, Violation

CLAUSE = "X5"
EVERY = tuple(
    getattr(torch, name)
    for name in (
        *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
)
"""Element types, of which a communicator declares some."""
TYPED = tuple(op for op in (*MOVES, *SUMS) if op != "exchange")
"""A round carries bytes, whatever they stand for."""
SHAPED = ("all_gather", "reduce_scatter", "all_to_all")
ROWS = ("too few counts", "a negative count", "more rows than there are")
MOST_CALLS = 3


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    one = st.one_of([kind for kind in _kinds(traits) if not kind.is_empty])
    drawn = st.tuples(st.lists(one, min_size=1, max_size=MOST_CALLS), few(traits))
    return drawn.map(lambda pair: program(*pair))


def _kinds(traits: Traits) -> list[st.SearchStrategy[Step]]:
    moved = {name_of(dtype) for dtype in movable(traits)}
    summed = {name_of(dtype) for dtype in traits.groups.reductions}
    alien = [name_of(dtype) for dtype in EVERY if name_of(dtype) not in moved]
    return [
        _steps("dtype", TYPED, alien),
        _steps("dtype", SUMS, sorted(moved - summed)),
        _steps("shape", SHAPED, ("one row too many", "one row too few")),
        _steps("mixed", ("all_gather", "all_to_all"), sorted(moved - {"uint8"})),
        _steps("rows", ("all_to_all_uneven",), ROWS),
        _steps("peer", ("isend", "irecv", "broadcast", "exchange"), (0, -1, 1, -2)),
    ]


def _steps(what: str, ops: Sequence[str], hows: Sequence[Argument]) -> st.SearchStrategy[Step]:
    if not hows:
        return st.nothing()
    pairs = st.tuples(st.sampled_from(ops), st.sampled_from(hows))
    return pairs.map(lambda pair: Step(what, pair))


@dataclass(frozen=True)
class _Wrong:
    """Calls that must be refused, by the first word of their step."""

    group: Communicator
    operands: Laid

    def dtype(self, op: str, name: object) -> None:
        """Of an element type that is not declared, or not declared to be summed."""
        start(self.group, Call(op, dtype_of(name), (2,)), self.operands)

    def shape(self, op: str, how: object) -> None:
        """The side that holds a row for every rank has one too few, or one too many."""
        rows = self.group.size + (1 if how == "one row too many" else -1)
        wide, narrow = self.operands.out((rows, 2), torch.int32), (2,)
        if op == "all_gather":
            self.group.all_gather(wide, self.operands.out(narrow, torch.int32))
        elif op == "reduce_scatter":
            self.group.reduce_scatter(self.operands.out(narrow, torch.int32), wide)
        else:
            self.group.all_to_all(self.operands.out((rows, 2), torch.int32), wide)

    def mixed(self, op: str, name: object) -> None:
        """Output and input of two element types, both declared."""
        size = self.group.size
        narrow, wide = ((2,), (size, 2)) if op == "all_gather" else ((size, 2), (size, 2))
        tensor = self.operands.out(narrow, torch.uint8)
        out = self.operands.out(wide, dtype_of(name))
        (self.group.all_gather if op == "all_gather" else self.group.all_to_all)(out, tensor)

    def rows(self, _: str, how: object) -> None:
        """Row counts that fit neither the group nor the tensors."""
        size = self.group.size
        good = [1] * size
        sends = {
            "too few counts": good[1:],
            "a negative count": [-1, *good[1:-1], 3] if size > 1 else [-1],
            "more rows than there are": [2, *good[1:]],
        }[str(how)]
        tensor, out = (self.operands.out((size, 2), torch.uint8) for _ in range(2))
        self.group.all_to_all_uneven(out, tensor, good, sends)

    def peer(self, op: str, by: object) -> None:
        """A rank that is not of the group: so far below the first, or above the last."""
        distance = int(str(by))
        peer = distance if distance < 0 else self.group.size + distance
        data = self.operands.out((4,), torch.uint8)
        calls: dict[str, Callable[[], object]] = {
            "isend": lambda: self.group.isend(data, peer),
            "irecv": lambda: self.group.irecv(data, peer),
            "broadcast": lambda: self.group.broadcast(data, peer),
            "exchange": lambda: self.group.exchange(Exchange((Parcel(peer, data),), ())),
        }
        calls[op]()


def _refused(wrong: _Wrong, step: Step) -> None:
    """Demand `Unsupported`, at the call."""
    calls: dict[str, Callable[[str, object], None]] = {
        "dtype": wrong.dtype,
        "shape": wrong.shape,
        "mixed": wrong.mixed,
        "rows": wrong.rows,
        "peer": wrong.peer,
    }
    op, how = step.args
    where = f"rank {wrong.group.rank}: {step}"
    try:
        calls[step.op](str(op), how)
    except Unsupported:
        return
    except Exception as error:
        raise Violation(CLAUSE, f"{where} raised {error!r}, not Unsupported") from error
    raise Violation(CLAUSE, f"{where} was not refused at the call")


def _play(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    kept = []
    for step in found.steps:
        kept.append(Laid(bench, CONTIGUOUS, "input"))
        _refused(_Wrong(group, kept[-1]), step)
        yield NEXT
    probes = yield from fly(bench, group, [PROBE], Plain(bench))
    expect(CLAUSE, group, probes)
    for step, operands in zip(found.steps, kept, strict=True):
        what = f"rank {group.rank}: {step} was refused, but its operands changed"
        demand(CLAUSE, operands.untouched(), what)


REJECTIONS = (
    Property(
        name="what-is-not-supported-is-refused-without-a-trace",
        family="shapes",
        clauses=(CLAUSE,),
        claim="Dtypes, sums, shapes, counts and peers that cannot be raise at the call, before "
        "any side effect.",
        programs=_programs,
        play=_play,
        ranks=Ranks.GROUP,
    ),
)
