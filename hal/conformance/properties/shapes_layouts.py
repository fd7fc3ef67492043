"""Family *shapes*: operands that are not contiguous, and calls that must be refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Communicator, Exchange, PeerBuffer
from equipoise.hal.conformance.context import NEXT, Play, RankContext, require, to_host
from equipoise.hal.conformance.fixtures.collectives import (
    COPY_OPS,
    IN_PLACE_OPS,
    PROBE_OPS,
    REDUCE_OPS,
    UNEVEN_OP,
    CollectiveCall,
    InflightCall,
    InputValues,
    PlainBuffers,
    calls_in,
    dtype_name,
    dtype_named,
    issue_call,
    probe_call,
    require_results,
    run_calls,
    small_integers,
)
from equipoise.hal.conformance.fixtures.strategies import (
    any_collective_step,
    common_sizes,
    copyable_dtypes,
    offered,
    offers_any,
    one_common_size,
    programs_by_size,
)
from equipoise.hal.conformance.program import Argument, Program, Step, make_program
from equipoise.hal.conformance.property import Property, PropertyScope, Traits
from equipoise.hal.errors import Unsupported, Violation

_PROBE = offers_any(*PROBE_OPS)
CONTIGUOUS = "contiguous"
LAYOUT_KINDS = ("offset", "transposed", "strided", "expanded")
LAYOUT_OPS = tuple(op for op in (*COPY_OPS, *REDUCE_OPS, UNEVEN_OP) if op != "exchange")
"""A round carries blobs, which are contiguous by definition."""
MAX_CALLS = 3
OFFSET_ELEMENTS = 16
"""Elements before an offset view: addresses off the alignment have a property of their own."""
INITIAL_BYTE = 0x01  # of every byte; also a legal truth value


def _layout_programs(traits: Traits) -> st.SearchStrategy[Program]:
    shapes = st.sampled_from(("2x2", "2x3", "3x2"))
    layout = st.tuples(st.sampled_from(LAYOUT_KINDS), st.sampled_from(("input", "output")))

    def sized(size: int) -> st.SearchStrategy[Program]:
        step = st.builds(_step, any_collective_step(traits, shapes, LAYOUT_OPS), layout)
        step_lists = st.lists(step, min_size=1, max_size=MAX_CALLS)
        return step_lists.map(lambda steps: make_program(filter(_possible, steps), size))

    return programs_by_size(common_sizes(traits), sized)


def _step(call: Step, laid: tuple[str, str]) -> Step:
    """Two more arguments: which layout, and of which operand."""
    return Step(call.op, (*call.args, *laid))


def _possible(step: Step) -> bool:
    """In-place has one operand; nothing can arrive right where several elements are one.

    Rows for several ranks differ, so those of an uneven all-to-all cannot be one.
    """
    kind, operand = step.args[3:]
    if step.op == UNEVEN_OP:
        return kind != "expanded"
    if step.op in IN_PLACE_OPS:
        return operand == "input" and kind != "expanded"
    return kind != "expanded" or operand == "input"


def identical_rows(call: CollectiveCall, sender: int, receiver: int) -> Tensor:
    """Values whose rows are all equal, as in an expanded operand."""
    return small_integers(call, sender, receiver)[:1].expand(call.shape)


@dataclass
class LaidOutBuffers:
    """Operands of one call, one of which may lie in a layout, and what they held at first.

    They are laid out on the host, and brought to the device as they lie, gaps included: so no
    device has to copy between layouts, which it may not be able to do for every dtype.

    Attributes:
        kind: one of `LAYOUT_KINDS`, or `CONTIGUOUS`.
        operand: input or output.
        initial_bytes: the memory of each operand, uint8, and what it held at first, on the host.
    """

    ctx: RankContext
    kind: str
    operand: str
    initial_bytes: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def copy_of(self, values: Tensor) -> Tensor:
        """Device memory with a copy of `values`."""
        kind, shape = self._kind("input"), tuple(values.shape)
        flat = _flat(kind, shape, values.dtype)
        view = _view(flat, kind, shape)
        if kind == "expanded":
            view[..., :1, :].copy_(values[..., :1, :])
        else:
            view.copy_(values)
        return self._on_device(flat, kind, shape)

    def output(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory for a result."""
        kind = self._kind("output")
        return self._on_device(_flat(kind, tuple(shape), dtype), kind, tuple(shape))

    def untouched(self) -> bool:
        """Whether every operand is as it was made, and what lies between its elements too."""
        return all(torch.equal(to_host(now), was) for now, was in self.initial_bytes)

    def _kind(self, operand: str) -> str:
        return self.kind if operand == self.operand else CONTIGUOUS

    def _on_device(self, flat: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
        data = flat.view(torch.uint8)
        memory = self.ctx.copy_of(data)
        self.initial_bytes.append((memory, data))
        return _view(memory.view(flat.dtype), kind, shape)


def _flat(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for that shape in that layout, on the host: as many elements as it needs."""
    counts = {
        "strided": 2 * torch.Size(shape).numel(),
        "offset": OFFSET_ELEMENTS + torch.Size(shape).numel(),
    }
    count = counts.get(kind, torch.Size(shape).numel())
    if kind == "expanded":
        count //= shape[-2]
    return torch.full((count * dtype.itemsize,), INITIAL_BYTE, dtype=torch.uint8).view(dtype)


def _view(flat: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The operand of that shape in the memory that `_flat` made for it."""
    if kind == CONTIGUOUS:
        return flat.view(shape)
    if kind == "offset":
        return flat[OFFSET_ELEMENTS:].view(shape)
    if kind == "strided":
        return flat.view(*shape, 2)[..., 0]
    *lead, rows, columns = shape
    if kind == "transposed":
        return flat.view(*lead, columns, rows).transpose(-1, -2)
    return flat.view(*lead, 1, columns).expand(shape)


@dataclass(frozen=True)
class _AttemptedCall:
    """A call on laid operands: its flight, or none when it was rejected."""

    call: CollectiveCall
    operands: LaidOutBuffers
    flight: InflightCall | None


def _attempt_call(
    ctx: RankContext, comm: Communicator, call: CollectiveCall, step: Step
) -> _AttemptedCall:
    operands = LaidOutBuffers(ctx, str(step.args[3]), str(step.args[4]))
    try:
        return _AttemptedCall(call, operands, issue_call(comm, call, operands, _values(operands)))
    except Unsupported:
        return _AttemptedCall(call, operands, None)


def _values(operands: LaidOutBuffers) -> InputValues:
    return identical_rows if operands.kind == "expanded" else small_integers


def _play_layouts(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    attempts = []
    for call, step in zip(calls_in(program), program.steps, strict=True):
        attempts.append(_attempt_call(ctx, comm, call, step))
        yield NEXT
    probes = yield from run_calls(ctx, comm, [probe_call(comm)], PlainBuffers(ctx))
    require_results("S2", comm, probes)
    for attempt in attempts:
        if attempt.flight is not None:
            yield from attempt.flight.wait(ctx)
            require_results("S2", comm, [attempt.flight], _values(attempt.operands))
        where = (
            f"rank {comm.rank}: {attempt.operands.operand} {attempt.operands.kind}, {attempt.call}"
        )
        is_untouched = attempt.flight is not None or attempt.operands.untouched()
        require("S2", is_untouched, f"{where}: rejected, but its operands changed")
    return [attempt.flight is not None for attempt in attempts]


def _judge(program: Program, answers: Sequence[Any]) -> None:
    for rank, answer in enumerate(answers):
        what = f"rank {rank} took layouts {answer}, rank 0 took {answers[0]} of {program.lines()}"
        require("S2", answer == answers[0], what)


LAYOUTS = (
    Property(
        name="layouts-are-copied-right-or-rejected",
        family="shapes",
        clauses=("S2",),
        claim="Operands that are not contiguous arrive right, or are refused without a trace.",
        programs=_layout_programs,
        play=_play_layouts,
        judge=_judge,
        needs=_PROBE,
        scope=PropertyScope.GROUP,
    ),
)


CLAUSE = "X5"
ALL_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
)
"""Element types, of which a communicator declares some."""
DTYPE_CHECKED_OPS = tuple(op for op in (*COPY_OPS, *REDUCE_OPS) if op != "exchange")
"""A round carries bytes of any dtype."""
SHAPE_CHECKED_OPS = ("all_gather", "reduce_scatter", "all_to_all")
PEER_OPS = ("isend", "irecv", "broadcast", "exchange")
CALLABLE_OPS = (*COPY_OPS, *REDUCE_OPS, "all_to_all_uneven", "barrier")
"""Operations that may be declared absent; *shift* stands for messages between two ranks."""
BAD_ROW_COUNTS = ("too few counts", "a negative count", "more rows than there are")
BAD_ROWS = tuple(f"{side}: {how}" for side in ("sends", "receives") for how in BAD_ROW_COUNTS)
"""Counts that do not fit, on the side that they are on."""


def _unsupported_programs(traits: Traits) -> st.SearchStrategy[Program]:
    step = st.one_of([kind for kind in _kinds(traits) if not kind.is_empty])
    arguments = st.tuples(st.lists(step, min_size=1, max_size=MAX_CALLS), one_common_size(traits))
    return arguments.map(lambda pair: make_program(*pair))


def _kinds(traits: Traits) -> list[st.SearchStrategy[Step]]:
    moved = {dtype_name(dtype) for dtype in copyable_dtypes(traits)}
    summed = {dtype_name(dtype) for dtype in traits.comm_capabilities.reductions}
    alien = [dtype_name(dtype) for dtype in ALL_DTYPES if dtype_name(dtype) not in moved]
    return [
        _steps("dtype", offered(traits, DTYPE_CHECKED_OPS), alien),
        _steps("dtype", offered(traits, REDUCE_OPS), sorted(moved - summed)),
        _steps(
            "shape", offered(traits, SHAPE_CHECKED_OPS), ("one row too many", "one row too few")
        ),
        _steps("mixed", offered(traits, ("all_gather", "all_to_all")), sorted(moved - {"uint8"})),
        _steps("rows", offered(traits, ("all_to_all_uneven",)), BAD_ROWS),
        _steps("peer", offered(traits, PEER_OPS), (0, -1, 1, -2)),
        _steps("absent", [op for op in CALLABLE_OPS if op not in offered(traits, [op])], (0,)),
    ]


def _steps(what: str, ops: Sequence[str], hows: Sequence[Argument]) -> st.SearchStrategy[Step]:
    if not hows or not ops:
        return st.nothing()
    pairs = st.tuples(st.sampled_from(ops), st.sampled_from(hows))
    return pairs.map(lambda pair: Step(what, pair))


@dataclass(frozen=True)
class _UnsupportedCalls:
    """Calls that must be refused, by the first word of their step."""

    group: Communicator
    operands: LaidOutBuffers

    def dtype(self, op: str, name: object) -> None:
        """Of an element type that is not declared, or not declared to be summed."""
        issue_call(self.group, CollectiveCall(op, dtype_named(name), (2,)), self.operands)

    def shape(self, op: str, how: object) -> None:
        """The side that holds a row for every rank has one too few, or one too many."""
        rows = self.group.size + (1 if how == "one row too many" else -1)
        wide, narrow = self.operands.output((rows, 2), torch.int32), (2,)
        if op == "all_gather":
            self.group.all_gather(wide, self.operands.output(narrow, torch.int32))
        elif op == "reduce_scatter":
            self.group.reduce_scatter(self.operands.output(narrow, torch.int32), wide)
        else:
            self.group.all_to_all(self.operands.output((rows, 2), torch.int32), wide)

    def mixed(self, op: str, name: object) -> None:
        """Output and input of two element types, both declared."""
        size = self.group.size
        narrow, wide = ((2,), (size, 2)) if op == "all_gather" else ((size, 2), (size, 2))
        tensor = self.operands.output(narrow, torch.uint8)
        out = self.operands.output(wide, dtype_named(name))
        (self.group.all_gather if op == "all_gather" else self.group.all_to_all)(out, tensor)

    def rows(self, _: str, how: object) -> None:
        """Row counts that fit neither the group nor the tensors."""
        size = self.group.size
        good = [1] * size
        side, _, problem = str(how).partition(": ")
        bad = {
            "too few counts": good[1:],
            "a negative count": [-1, *good[1:-1], 3] if size > 1 else [-1],
            "more rows than there are": [2, *good[1:]],
        }[problem]
        tensor, out = (self.operands.output((size, 2), torch.uint8) for _ in range(2))
        receives, sends = (good, bad) if side == "sends" else (bad, good)
        self.group.all_to_all_uneven(out, tensor, receives, sends)

    def peer(self, op: str, by: object) -> None:
        """A rank that is not of the group: so far below the first, or above the last."""
        distance = int(str(by))
        peer = distance if distance < 0 else self.group.size + distance
        data = self.operands.output((4,), torch.uint8)
        calls: dict[str, Callable[[], object]] = {
            "isend": lambda: self.group.isend(data, peer),
            "irecv": lambda: self.group.irecv(data, peer),
            "broadcast": lambda: self.group.broadcast(data, peer),
            "exchange": lambda: self.group.exchange(Exchange((PeerBuffer(peer, data),), ())),
        }
        calls[op]()

    def absent(self, op: str, _: object) -> None:
        """An operation that is not offered, with operands that fit."""
        size = self.group.size
        if op == "barrier":
            self.group.barrier()
        elif op == "exchange":
            blob = PeerBuffer((self.group.rank + 1) % size, self.operands.output((4,), torch.uint8))
            self.group.exchange(Exchange((blob,), ()))
        elif op == "all_to_all_uneven":
            tensor, out = (self.operands.output((size, 2), torch.uint8) for _ in range(2))
            self.group.all_to_all_uneven(out, tensor, [1] * size, [1] * size)
        else:
            dtype = torch.int32 if op in REDUCE_OPS else torch.uint8
            issue_call(self.group, CollectiveCall(op, dtype, (2,)), self.operands)


def _require_refusal(wrong: _UnsupportedCalls, step: Step) -> None:
    """Demand `Unsupported`, at the call."""
    calls: dict[str, Callable[[str, object], None]] = {
        "dtype": wrong.dtype,
        "shape": wrong.shape,
        "mixed": wrong.mixed,
        "rows": wrong.rows,
        "peer": wrong.peer,
        "absent": wrong.absent,
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


def _play_unsupported(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    operands_by_step = []
    for step in program.steps:
        operands_by_step.append(LaidOutBuffers(ctx, CONTIGUOUS, "input"))
        _require_refusal(_UnsupportedCalls(comm, operands_by_step[-1]), step)
        yield NEXT
    probes = yield from run_calls(ctx, comm, [probe_call(comm)], PlainBuffers(ctx))
    require_results(CLAUSE, comm, probes)
    for step, operands in zip(program.steps, operands_by_step, strict=True):
        what = f"rank {comm.rank}: {step} was refused, but its operands changed"
        require(CLAUSE, operands.untouched(), what)


REJECTIONS = (
    Property(
        name="unsupported-calls-raise-before-any-side-effect",
        family="shapes",
        clauses=(CLAUSE,),
        claim="Operations that are absent, dtypes, sums, shapes, counts and peers that cannot be "
        "raise at the call, before any side effect.",
        programs=_unsupported_programs,
        play=_play_unsupported,
        needs=_PROBE,
        scope=PropertyScope.GROUP,
    ),
)
