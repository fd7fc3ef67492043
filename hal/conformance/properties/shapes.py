"""Family *shapes*: dtypes, shapes, addresses, uneven rows, group sizes."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.context import (
    Play,
    RankContext,
    require,
    require_equal,
    wait_for_success,
)
from equipoise.hal.conformance.fixtures.collectives import (
    COPY_OPS,
    POINT_TO_POINT_OPS,
    REDUCE_OPS,
    UNEVEN_OP,
    CollectiveCall,
    GuardedBuffers,
    PlainBuffers,
    calls_in,
    dtype_name,
    dtype_named,
    require_inputs_kept,
    require_results,
    run_calls,
    shape_text,
    small_integers,
)
from equipoise.hal.conformance.fixtures.strategies import (
    any_collective_step,
    common_sizes,
    copyable_dtypes,
    offers,
    offers_any,
    programs_by_size,
)
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.properties.large_collectives import SHAPES as SIZES
from equipoise.hal.conformance.properties.shapes_layouts import LAYOUTS, REJECTIONS
from equipoise.hal.conformance.property import Property, PropertyScope, Traits

MAX_PAIRS = 8
MAX_ROWS = 4


def _uneven_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Pairs that are not named have no rows; a pair that is named twice has those of the last."""
    names = st.sampled_from([dtype_name(dtype) for dtype in copyable_dtypes(traits)])

    def sized(size: int) -> st.SearchStrategy[Program]:
        rank = st.integers(0, size - 1)
        pair = st.builds(_rows, rank, rank, st.integers(1, MAX_ROWS))
        pairs = st.lists(pair, max_size=MAX_PAIRS)
        return st.builds(
            lambda steps, dtype, width: make_program(steps, size, {"dtype": dtype, "width": width}),
            pairs,
            names,
            st.integers(2, 3),
        )

    return programs_by_size(common_sizes(traits), sized)


def _rows(source: int, destination: int, rows: int) -> Step:
    return Step("rows", (destination, rows), source)


def row_counts(program: Program) -> list[list[int]]:
    """Rows by source and destination."""
    table = [[0] * program.size for _ in range(program.size)]
    for step in program.steps:
        table[step.rank][int(step.args[0])] = int(step.args[1])
    return table


def _block(program: Program, rows: int, sender: int, receiver: int) -> Tensor:
    shape = (rows, program.int_setting("width"))
    return small_integers(
        CollectiveCall("rows", dtype_named(program.setting("dtype")), shape), sender, receiver
    )


def _play_uneven(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    table, rank, ranks = row_counts(program), comm.rank, range(program.size)
    sends, receives = table[rank], [table[sender][rank] for sender in ranks]
    tensor = ctx.copy_of(torch.cat([_block(program, sends[r], rank, r) for r in ranks]))
    expected = torch.cat([_block(program, receives[r], r, rank) for r in ranks])
    out = ctx.empty(tuple(expected.shape), expected.dtype)
    work = comm.all_to_all_uneven(out, tensor, receives, sends)
    yield from wait_for_success(ctx, work, "all_to_all_uneven")
    require_equal("S3", out, expected, f"rank {rank} after sends {sends}, receives {receives}")


UNEVEN = (
    Property(
        name="uneven-rows-arrive",
        family="shapes",
        clauses=("S3",),
        claim="All-to-all moves any number of rows between any two ranks, none and all included.",
        programs=_uneven_programs,
        play=_play_uneven,
        needs=offers("all_to_all_uneven"),
        scope=PropertyScope.GROUP,
    ),
)


MAX_SUBGROUP_CALLS = 5
SUBGROUP_OPS = (*COPY_OPS, *REDUCE_OPS)


def _subgroup_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Calls, each among the members it names; the same members use one communicator."""

    def sized(size: int) -> st.SearchStrategy[Program]:
        call = st.tuples(any_collective_step(traits, st.just("3"), SUBGROUP_OPS), _members(size))
        step_lists = st.lists(call.map(_step), min_size=1, max_size=MAX_SUBGROUP_CALLS)
        return step_lists.map(lambda steps: make_program(filter(_possible, steps), size))

    return programs_by_size(traits.group_sizes, sized)


def _members(size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """All ranks, or some in any order."""
    some = st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)
    return st.just(tuple(range(size))) | some.map(tuple)


def _step(pair: tuple[Step, tuple[int, ...]]) -> Step:
    call, members = pair
    return Step(call.op, (*call.args, shape_text(members)))


def _possible(step: Step) -> bool:
    """A group of one has no peer."""
    return step.op not in POINT_TO_POINT_OPS or "x" in str(step.args[3])


def _play_subgroups(ctx: RankContext, program: Program) -> Play:
    groups: dict[str, Communicator] = {}
    for call, step in zip(calls_in(program), program.steps, strict=True):
        names = str(step.args[3])
        members = [int(name) for name in names.split("x")]
        if ctx.rank not in members:
            continue
        if names not in groups:
            groups[names] = yield from ctx.communicator(f"among {names}", members)
        group = groups[names]
        place = (members.index(ctx.rank), len(members))
        here = f"rank {ctx.rank} among {members}"
        require("S5", (group.rank, group.size) == place, f"{here} is {group.rank} of {group.size}")
        issued = yield from run_calls(ctx, group, [call], PlainBuffers(ctx))
        require_results("S5", group, issued)


SUBGROUPS = (
    Property(
        name="groups-of-any-size-and-members-work",
        family="shapes",
        clauses=("S5",),
        claim="Collectives work in groups of every size, and among any of the ranks in any order.",
        programs=_subgroup_programs,
        play=_play_subgroups,
        needs=offers_any(*SUBGROUP_OPS),
        scope=PropertyScope.GROUP,
    ),
)


FAMILY = "shapes"
MAX_CALLS = 4
COLLECTIVE_OPS = (*COPY_OPS, *REDUCE_OPS)
OFFSETS = (1, 2, 4)


def _plain(traits: Traits) -> st.SearchStrategy[Program]:
    """Rows of 2 to 5 elements; other shapes have properties of their own."""
    rows = st.integers(2, 5).map(str)
    return programs_by_size(
        common_sizes(traits),
        lambda size: _lists(any_collective_step(traits, rows, COLLECTIVE_OPS, size), size),
    )


def _shaped_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Up to four dimensions, each of 0 to 3: also empty ones, and single bytes."""
    any_shape = st.lists(st.integers(0, 3), max_size=4).map(shape_text)
    shapes = st.sampled_from(("1", "", "0")) | any_shape
    return programs_by_size(
        common_sizes(traits),
        lambda size: _lists(any_collective_step(traits, shapes, COLLECTIVE_OPS), size),
    )


def _lists(calls: st.SearchStrategy[Step], size: int) -> st.SearchStrategy[Program]:
    step_lists = st.lists(calls, min_size=1, max_size=MAX_CALLS)
    return step_lists.map(lambda steps: make_program(steps, size))


def _misaligned_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """At every distance that is whole elements: no address of an element may be odd for it."""
    calls = st.lists(
        any_collective_step(traits, st.integers(2, 5).map(str), (*COLLECTIVE_OPS, UNEVEN_OP)),
        min_size=1,
        max_size=MAX_CALLS,
    )

    def sized(size: int) -> st.SearchStrategy[Program]:
        return st.builds(
            lambda offset, steps: make_program(
                (s for s in steps if offset % dtype_named(s.args[0]).itemsize == 0),
                size,
                {"offset": offset},
            ),
            st.sampled_from(OFFSETS),
            calls,
        )

    return programs_by_size(common_sizes(traits), sized)


def _play_plain(ctx: RankContext, program: Program) -> Play:
    """All of them in flight at once."""
    comm = yield from ctx.communicator()
    issued = yield from run_calls(ctx, comm, calls_in(program), PlainBuffers(ctx))
    require_results("X4", comm, issued)
    require_inputs_kept("X4", comm, issued)


def _play_shaped(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    for call in calls_in(program):
        require_results("S1", comm, (yield from run_calls(ctx, comm, [call], PlainBuffers(ctx))))


def _play_misaligned(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    for call in calls_in(program):
        buffers = GuardedBuffers(ctx, program.int_setting("offset"))
        require_results("S4", comm, (yield from run_calls(ctx, comm, [call], buffers)))
        what = f"rank {ctx.rank}: {call} changed bytes beside its buffers"
        require("A4", buffers.guards_intact(), what)


PROPERTIES = (
    Property(
        name="every-collective-equals-its-definition",
        family=FAMILY,
        clauses=("X4",),
        claim="Every collective gives what its definition says, on every declared dtype, and only "
        "reads its input.",
        programs=_plain,
        play=_play_plain,
        needs=offers_any(*COLLECTIVE_OPS),
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="every-dtype-and-shape-is-transported",
        family=FAMILY,
        clauses=("S1",),
        claim="Every dtype travels at zero to four dimensions, empty, and as a single byte.",
        programs=_shaped_programs,
        play=_play_shaped,
        needs=offers_any(*COLLECTIVE_OPS),
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="misaligned-buffers-arrive-and-their-neighbours-stay",
        family=FAMILY,
        clauses=("S4", "A4"),
        claim="Addresses 1, 2 and 4 bytes off work, and nothing beside a buffer is written.",
        programs=_misaligned_programs,
        play=_play_misaligned,
        needs=offers_any(*COLLECTIVE_OPS),
        scope=PropertyScope.GROUP,
    ),
    *SIZES,
    *LAYOUTS,
    *UNEVEN,
    *SUBGROUPS,
    *REJECTIONS,
)
