"""Family *expert_parallel*: dispatch and combine of an expert-parallel library (clauses M1 to M16).

Each property is played on a library that is named; without one the family is left out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.clauses import EXPERT_PARALLEL
from equipoise.hal.conformance.context import (
    NEXT,
    Play,
    RankContext,
    Until,
    control_plane,
    gather_ballots,
    require,
    require_equal,
    to_host,
)
from equipoise.hal.conformance.fixtures.expert_steps import (
    Batch,
    BrokenClauses,
    ExpertRun,
    OpenDispatch,
    batches,
    close_run,
    guarded_copy,
    meet,
    open_run,
    play_steps,
    usual_calls,
)
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.properties.resources import require_no_more
from equipoise.hal.conformance.property import (
    DeadlineLength,
    Judge,
    Property,
    PropertyScope,
    Requirement,
    Traits,
    all_of,
    no_comparison,
    no_requirement,
)
from equipoise.hal.conformance.subject import describe_error
from equipoise.hal.errors import StreamTimeout, Violation
from equipoise.hal.expert_parallel import ExpertParallelCapabilities

MAX_TOKENS = 4
"""Tokens of a rank in one batch."""
MAX_EXPERTS_PER_RANK = 3
MAX_BATCHES = 4
"""Of a program: libraries have two buffers, and the third batch finds what the first one left."""
HIDDEN_SIZES = (8, 24)
"""Row lengths where the library takes any."""
LARGE_BATCHES = (1, 64, 65, 129)
"""Tokens of the ranks in one batch of a large case, in turn."""
LARGE_EXPERTS = 272
"""Of all ranks in a large case: more than fit in a byte."""
LARGE_HIDDEN = 136
"""Row length of a large case: more than one block of 128, and no whole number of them."""
MAX_LARGE_BATCH = 200
"""Tokens of every rank in the other batch: more rows for a rank than 1024."""


def has_library(traits: Traits) -> bool:
    """An expert-parallel library is judged."""
    return traits.expert_parallel is not None


def declared(traits: Traits) -> ExpertParallelCapabilities:
    """What the library declares."""
    return traits.expert_parallel or ExpertParallelCapabilities()


def group_sizes(traits: Traits) -> tuple[int, ...]:
    """Numbers of ranks that can be played and that the library takes."""
    declared_sizes = declared(traits).group_sizes
    return tuple(s for s in traits.group_sizes if not declared_sizes or s in declared_sizes)


def needs_ranks(least: int = 1) -> Requirement:
    """Requires a group of so many ranks at least that the library takes."""
    return lambda traits: None if max(group_sizes(traits), default=0) >= least else "group_sizes"


def needs_capability(name: str) -> Requirement:
    """Requires a capability of the library."""
    return lambda traits: None if getattr(declared(traits), name) else name


# ----- programs -----------------------------------------------------------------------------------


Values = dict[str, int | str]
"""The settings of a program."""


def draw_settings(draw: st.DrawFn, traits: Traits, least_ranks: int = 1) -> tuple[int, Values]:
    """Number of ranks, and the settings of a program."""
    library = declared(traits)
    size = draw(st.sampled_from([n for n in group_sizes(traits) if n >= least_ranks]))
    experts_per_rank = draw(st.sampled_from(_experts_per_rank(library)))
    top_ks = [k for k in library.top_ks or range(1, 5) if k <= size * experts_per_rank]
    if not top_ks:  # as many experts as the smallest number of choices takes
        top_ks = [min(library.top_ks)]
        experts_per_rank = _enough_experts(library, size, top_ks[0])
    replicas = [n for n in (1, 2) if experts_per_rank * size % n == 0]
    return size, {
        "experts_per_rank": experts_per_rank,
        "top_k": draw(st.sampled_from(top_ks)),
        "hidden": draw(st.sampled_from(library.hidden_sizes[:2] or HIDDEN_SIZES)),
        "dtype": draw(st.sampled_from([str(d).removeprefix("torch.") for d in library.dtypes])),
        "replicas": draw(st.sampled_from(replicas)),
        "row_capacity": 0,
        "spare": draw(st.integers(0, 2)),
        "reals": 0,
    }


def _experts_per_rank(library: ExpertParallelCapabilities) -> list[int]:
    """Small numbers of experts of a rank that the library takes, or the smallest one."""
    declared_numbers = library.experts_per_rank or range(1, MAX_EXPERTS_PER_RANK + 1)
    return [n for n in declared_numbers if n <= MAX_EXPERTS_PER_RANK] or [min(declared_numbers)]


def _enough_experts(library: ExpertParallelCapabilities, size: int, top_k: int) -> int:
    """The fewest experts of a rank that the library takes, and that make `top_k` of all ranks."""
    needed = -(-top_k // size)
    return min((n for n in library.experts_per_rank if n >= needed), default=needed)


def distinct_choices(values: Values, size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """The experts of a token, all different."""
    top_k, experts = int(values["top_k"]), size * int(values["experts_per_rank"])
    chosen = st.lists(st.integers(0, experts - 1), min_size=top_k, max_size=top_k, unique=True)
    return chosen.map(tuple)


Choosing = Callable[[Values, int], st.SearchStrategy[tuple[int, ...]]]
"""The experts of a token, for given settings and a number of ranks."""


@st.composite
def batch_steps(
    draw: st.DrawFn, traits: Traits, size: int, choices: st.SearchStrategy[tuple[int, ...]]
) -> list[Step]:
    """The tokens of all ranks in one batch."""
    least = 0 if declared(traits).empty_batches else 1
    steps = []
    for rank in range(size):
        tokens = draw(st.lists(choices, min_size=least, max_size=MAX_TOKENS))
        steps += [Step("token", token, rank) for token in tokens]
    return steps


def round_trips(
    choosing: Choosing = distinct_choices, most: int = MAX_BATCHES, reals: bool = False
) -> Callable[[Traits], st.SearchStrategy[Program]]:
    """Programs of a few batches, each dispatched, combined and finished."""

    @st.composite
    def programs(draw: st.DrawFn, traits: Traits) -> Program:
        size, values = draw_settings(draw, traits)
        values |= {"reals": int(reals)}
        steps: list[Step] = []
        for _ in range(draw(st.integers(1, most))):
            steps += draw(batch_steps(traits, size, choosing(values, size)))
            steps += [Step("dispatch"), Step("finish")]
        return make_program(steps, size, values)

    return lambda traits: programs(traits)


# ----- M17: methods -------------------------------------------------------------------------------


def _play_methods(ctx: RankContext, program: Program) -> Play:
    """Opening and dispatching compare the form; what else fails is no matter of methods."""
    try:
        run: ExpertRun = yield from open_run(ctx, program, BrokenClauses("M17", "M1"))
        batch = run.make_batch(batches(program)[0])
        run.combine(run.dispatch(batch, run.inputs(batch)))
        yield from run.end_step()
        yield from close_run(run)
    except Violation:
        raise
    except Exception as error:
        raise Violation("M1", describe_error(error)) from error


# ----- M1, M2, M5: what arrives, and what comes back ----------------------------------------------


def _play_round_trips(
    clauses: BrokenClauses, spoil: bool = False
) -> Callable[[RankContext, Program], Play]:
    def play(ctx: RankContext, program: Program) -> Play:
        run: ExpertRun = yield from open_run(ctx, program, clauses)
        run.spoil = spoil
        yield from play_steps(run, program, usual_calls(run, program))
        yield from run.finish()
        yield from close_run(run)

    return play


def _play_counts(ctx: RankContext, program: Program) -> Play:
    run: ExpertRun = yield from open_run(ctx, program, BrokenClauses("M2", "M1"))
    calls = usual_calls(run, program)

    def finish() -> Play:
        dispatches = list(run.opened)
        yield from run.finish()
        for dispatch in dispatches:
            _require_counts(run, dispatch)

    yield from play_steps(run, program, calls | {"finish": finish})
    yield from close_run(run)


def _require_counts(run: ExpertRun, dispatch: OpenDispatch) -> None:
    require("M5", dispatch.counts is not None, "counts are declared, and none are reported")
    assert dispatch.counts is not None
    experts = to_host(dispatch.experts).long()
    arrived = torch.bincount(experts[experts >= 0], minlength=run.sizes.experts_per_rank).tolist()
    counts = to_host(dispatch.counts).tolist()
    what = f"dispatch {dispatch.batch.number}: counts {counts} reported, rows {arrived} received"
    require("M5", counts == arrived, what)


# ----- M3, M4: edges of the load and of the choices -----------------------------------------------


@st.composite
def _uneven_programs(draw: st.DrawFn, traits: Traits) -> Program:
    """All tokens have the same choices, and some ranks have no tokens where that is allowed."""
    size, values = draw_settings(draw, traits)
    steps: list[Step] = []
    least = 0 if declared(traits).empty_batches else 1
    for _ in range(draw(st.integers(1, MAX_BATCHES))):
        choices = draw(distinct_choices(values, size))
        for rank in range(size):
            count = draw(st.sampled_from([least, MAX_TOKENS]))
            steps += [Step("token", choices, rank)] * count
        steps += [Step("dispatch"), Step("finish")]
    return make_program(steps, size, values)


def _choices_beyond(traits: Traits) -> Choosing:
    """Choices with padding and repetitions, as far as they are declared."""
    library = declared(traits)

    def choosing(values: Values, size: int) -> st.SearchStrategy[tuple[int, ...]]:
        top_k, experts = int(values["top_k"]), size * int(values["experts_per_rank"])
        least = -1 if library.padding else 0
        chosen = st.lists(st.integers(least, experts - 1), min_size=top_k, max_size=top_k)
        if not library.repeated_experts:
            chosen = chosen.filter(lambda ids: _repeats(ids) == 0)
        return chosen.map(tuple)

    return choosing


def _repeats(ids: Sequence[int]) -> int:
    selected = [expert for expert in ids if expert >= 0]
    return len(selected) - len(set(selected))


def _padding_or_repetition(traits: Traits) -> str | None:
    library = declared(traits)
    return None if library.padding or library.repeated_experts else "padding"


# ----- M6: only read ------------------------------------------------------------------------------


def _play_guarded(ctx: RankContext, program: Program) -> Play:
    run: ExpertRun = yield from open_run(ctx, program, BrokenClauses("M2", "M1"))
    for number, choices in enumerate(batches(program)):
        batch = run.make_batch(choices)
        plain = run.inputs(batch)
        guarded = [guarded_copy(ctx, to_host(value)) for value in plain]
        tokens, expert_ids, weights = (view for _, view in guarded)
        dispatch = run.dispatch(batch, (tokens, expert_ids, weights))
        yield NEXT
        outputs = ctx.guarded_buffer(dispatch.rows.shape[0] * run.sizes.hidden * _item(run))
        rows = outputs.data.view(run.sizes.dtype).view(-1, run.sizes.hidden)
        run.launch_experts(rows, dispatch)
        passed = ctx.empty(rows.shape, rows.dtype)
        run.launch_copy(passed, rows)
        run.combine(dispatch, rows)
        yield from run.finish()
        for name, (buffer, view), value in zip(NAMES, guarded, plain, strict=True):
            where = f"dispatch {number}: bytes beside the {name} were written"
            require("M6", buffer.guards_intact(), where)
            require_equal("M6", view, value, f"dispatch {number}: {name} after the step")
        what = f"dispatch {number}: bytes beside the experts' outputs were written"
        require("M6", outputs.guards_intact(), what)
        require_equal("M6", rows, passed, f"dispatch {number}: the experts' outputs after the step")
    yield from close_run(run)


NAMES = ("tokens", "expert ids", "weights")


def _item(run: ExpertRun) -> int:
    return run.sizes.dtype.itemsize


# ----- M8, M9: handles ----------------------------------------------------------------------------


@st.composite
def _handle_programs(draw: st.DrawFn, traits: Traits) -> Program:
    """A handle is combined again, at once or after further dispatches."""
    size, values = draw_settings(draw, traits)
    choices = distinct_choices(values, size)
    steps = [*draw(batch_steps(traits, size, choices)), Step("dispatch"), Step("combine", (0,))]
    for _ in range(draw(st.integers(0, 3))):
        steps += [*draw(batch_steps(traits, size, choices)), Step("dispatch")]
        if declared(traits).in_flight < 2 or draw(st.booleans()):
            steps += [Step("combine", (0,))]
        else:
            steps += [Step("again", (0,)), Step("combine", (0,))]
    return make_program([*steps, Step("again", (0,))], size, values)


def _play_handles(ctx: RankContext, program: Program) -> Play:
    """Returns whether each second combine was refused, in order."""
    run: ExpertRun = yield from open_run(ctx, program, BrokenClauses("M8", "M8"))
    calls, outcomes = usual_calls(run, program), list[bool]()

    def again(number: int) -> Play:
        dispatch = run.ended[number]
        outputs = run.outputs(dispatch)
        try:
            run.combine(dispatch, outputs)
        except Exception:
            outcomes.append(True)
        else:
            outcomes.append(False)
        yield NEXT

    yield from play_steps(run, program, calls | {"again": again})
    yield from run.finish()
    yield from close_run(run)
    return outcomes


def _same_outcome(clause: str, what: str) -> Judge:
    """Ranks that took part must have the same answer."""

    def judge(_: Program, answers: Sequence[Any]) -> None:
        present = [answer for answer in answers if answer is not None]
        differs = [rank for rank, answer in enumerate(answers) if answer not in (None, present[0])]
        if differs:
            raise Violation(clause, f"{what}: {present[0]} on rank 0, not on ranks {differs}")

    return judge


@st.composite
def _in_flight_programs(draw: st.DrawFn, traits: Traits) -> Program:
    """As many dispatches are open as are declared, and combined in any order."""
    size, values = draw_settings(draw, traits)
    choices, most = distinct_choices(values, size), declared(traits).in_flight
    steps: list[Step] = []
    opened = 0
    for _ in range(draw(st.integers(2, 5))):
        if opened == most:
            steps.append(Step("combine", (draw(st.integers(0, opened - 1)),)))
            opened -= 1
        steps += [*draw(batch_steps(traits, size, choices)), Step("dispatch")]
        opened += 1
    return make_program(steps, size, values)


def _several_in_flight(traits: Traits) -> str | None:
    return None if declared(traits).in_flight > 1 else "in_flight"


# ----- M10: masks of lost ranks -------------------------------------------------------------------


@st.composite
def _mask_programs(draw: st.DrawFn, traits: Traits) -> Program:
    size, values = draw_settings(draw, traits, least_ranks=2)
    choices = distinct_choices(values, size)
    lost = draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    steps: list[Step] = []
    if draw(st.booleans()):
        steps += [*draw(batch_steps(traits, size, choices)), Step("dispatch"), Step("finish")]
    steps.append(Step("lose", tuple(sorted(lost))))
    for _ in range(draw(st.integers(1, 2))):
        steps += [*draw(batch_steps(traits, size, choices)), Step("dispatch"), Step("finish")]
    return make_program(steps, size, values)


def _play_masks(ctx: RankContext, program: Program) -> Play:
    run: ExpertRun = yield from open_run(ctx, program, BrokenClauses("M10", "M10"))

    def lose(*ranks: int) -> Play:
        run.active -= frozenset(ranks)
        if ctx.rank in run.active:
            run.group.set_active(sorted(run.active))
        yield NEXT

    yield from play_steps(run, program, usual_calls(run, program) | {"lose": lose})
    yield from close_run(run)


# ----- M11: capture and replay --------------------------------------------------------------------


@st.composite
def _graph_programs(draw: st.DrawFn, traits: Traits) -> Program:
    """The first batch is played before the capture; all have as many tokens on a rank."""
    size, values = draw_settings(draw, traits)
    choices = distinct_choices(values, size)
    counts = [draw(st.integers(1, MAX_TOKENS)) for _ in range(size)]
    steps: list[Step] = []
    for _ in range(draw(st.integers(2, 4))):
        for rank, count in enumerate(counts):
            steps += [Step("token", draw(choices), rank) for _ in range(count)]
        steps.append(Step("dispatch"))
    return make_program(steps, size, values)


def _play_graph(ctx: RankContext, program: Program) -> Play:
    run: ExpertRun = yield from open_run(ctx, program, BrokenClauses("M11", "M11"))
    first, *others = [run.make_batch(choices) for choices in batches(program)]
    inputs = run.inputs(first)
    run.dispatch(first, inputs)
    yield from run.finish()
    graph = ctx.accelerator.graph()
    graph.capture(run.stream, lambda: run.combine(run.dispatch(first, inputs)))
    (dispatch,), (combined,) = run.ended, run.combined
    run.unread = []
    for batch in others:
        for into, value in zip(inputs, run.inputs(batch), strict=True):
            run.launch_copy(into, value)
        graph.replay(run.stream)
        yield from run.end_step()
        dispatch.batch = batch
        run.ended, run.combined = [dispatch], [combined]
        run.judge()
    yield from close_run(run)


def _graphs(traits: Traits) -> str | None:
    both = declared(traits).graph_capture and traits.accelerator.graph_capture
    return None if both else "graph_capture"


# ----- M12, M13: what does not fit ----------------------------------------------------------------

MISFITS = ("tokens", "hidden", "choices", "dtype")


@st.composite
def _misfit_programs(draw: st.DrawFn, traits: Traits) -> Program:
    size, values = draw_settings(draw, traits)
    choices = distinct_choices(values, size)
    rank = draw(st.integers(0, size - 1))
    steps = [Step("misfit", (draw(st.sampled_from(MISFITS)),), rank)]
    steps += [*draw(batch_steps(traits, size, choices)), Step("dispatch"), Step("finish")]
    return make_program(steps, size, values)


def _play_misfits(ctx: RankContext, program: Program) -> Play:
    run: ExpertRun = yield from open_run(ctx, program, BrokenClauses("M12", "M12"))
    own = [step for step in program.steps_of(ctx.rank) if step.op == "misfit"]
    fullest = max((len(tokens) for batch in batches(program) for tokens in batch), default=0)
    for step in own:
        arguments = _misfit(run, str(step.args[0]), max(1, fullest) + run.sizes.spare + 1)
        try:
            run.group.dispatch(*arguments, run.stream)
        except Exception:
            continue
        raise Violation("M12", f"a batch that does not fit ({step.args[0]}) was accepted")

    def misfit(_: str) -> Play:
        yield NEXT

    yield from play_steps(run, program, usual_calls(run, program) | {"misfit": misfit})
    yield from close_run(run)


def _misfit(run: ExpertRun, what: str, too_many: int) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of a dispatch that differ from what the group was opened with in one size."""
    sizes = run.sizes
    count = too_many if what == "tokens" else 1
    hidden = sizes.hidden + 8 if what == "hidden" else sizes.hidden
    choices = sizes.top_k + 1 if what == "choices" else sizes.top_k
    dtype = torch.float64 if what == "dtype" else sizes.dtype
    return (
        run.ctx.full((count, hidden), 1, dtype),
        run.ctx.full((count, choices), 0, torch.int32),
        run.ctx.full((count, choices), 1, torch.float32),
    )


@st.composite
def _capacity_programs(draw: st.DrawFn, traits: Traits) -> Program:
    size, values = draw_settings(draw, traits)
    values["row_capacity"] = draw(st.integers(1, MAX_TOKENS))
    choices = distinct_choices(values, size)
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 3))):
        steps += [*draw(batch_steps(traits, size, choices)), Step("dispatch")]
    return make_program(steps, size, values)


def _play_capacity(ctx: RankContext, program: Program) -> Play:
    """Returns whether each step was refused as too large, in order."""
    run: ExpertRun = yield from open_run(ctx, program, BrokenClauses("M13", "M13"))
    refused = []
    for choices in batches(program):
        batch = run.make_batch(choices)
        error = yield from _step(run, batch)
        refused.append(error is not None)
        if error is not None:
            fits = _fullest_message(run, batch) <= run.sizes.row_capacity
            what = f"dispatch {batch.number} fits, and was refused: {error}"
            require("M13", not fits, what)
            run.opened, run.ended, run.combined, run.unread = [], [], [], []
        else:
            run.judge()
    yield from close_run(run)
    return refused


def _step(run: ExpertRun, batch: Batch) -> Play:
    """Dispatch, combine and finish; returns the error that one of them raised, or None."""
    try:
        dispatch = run.dispatch(batch, run.inputs(batch))
        yield NEXT
        run.combine(dispatch)
        run.read_again()
        status = run.launch_end()
    except Exception as error:
        return error
    yield Until(status.ready, "the end of a step")
    try:
        status.result(run.patience)
    except StreamTimeout as error:
        what = f"dispatch {batch.number} neither ended nor failed: {error}"
        raise Violation(run.clauses.result, what) from error
    except Exception as error:
        return error
    run.in_use.clear()
    return None


def _fullest_message(run: ExpertRun, batch: Batch) -> int:
    """Most choices of one rank that fall on one rank: no library needs more rows for them."""
    per_rank = run.sizes.experts_per_rank
    by_pair = [
        sum(expert // per_rank == home for token in tokens for expert in token)
        for tokens in batch.choices
        for home in range(run.sizes.ranks)
    ]
    return max(by_pair)


# ----- M14, M15: peers that do not come, or route by other tables ---------------------------------


@st.composite
def _absence_programs(draw: st.DrawFn, traits: Traits) -> Program:
    size, values = draw_settings(draw, traits, least_ranks=2)
    choices = distinct_choices(values, size)
    steps = [*draw(batch_steps(traits, size, choices)), Step("dispatch")]
    where = draw(st.sampled_from([len(steps) - 1, len(steps)]))
    steps.insert(where, Step("stay_away", (), draw(st.integers(0, size - 1))))
    return make_program(steps, size, values)


def _play_absence(ctx: RankContext, program: Program) -> Play:
    run: ExpertRun = yield from open_run(ctx, program, BrokenClauses("M14", "M14"))
    (absent,) = [step.rank for step in program.steps if step.op == "stay_away"]
    question = f"{run.purpose}/told"
    others = [rank for rank in range(program.size) if rank != absent]
    if ctx.rank == absent:
        if program.steps[-1].op == "stay_away":
            batch = run.make_batch(batches(program)[0])
            run.dispatch(batch, run.inputs(batch))
        yield from gather_ballots(ctx, question, others)
    else:
        batch = run.make_batch(batches(program)[0])
        error = yield from _step(run, batch)
        control_plane(ctx).cast(question, b"told")
        if error is None:
            # A library may end well where nothing of the absent rank was needed.
            needed = program.steps[-1].op != "stay_away" or _chosen(run, batch, absent)
            require("M14", not needed, f"rank {absent} stayed away, and nothing was told")
            run.judge()
        yield from gather_ballots(ctx, question, others)
    run.group.close()


@st.composite
def _late_programs(draw: st.DrawFn, traits: Traits) -> Program:
    """A rank comes late to a dispatch or to a combine, by less than the deadline."""
    size, values = draw_settings(draw, traits, least_ranks=2)
    choices = distinct_choices(values, size)
    steps = [*draw(batch_steps(traits, size, choices)), Step("dispatch"), Step("finish")]
    where = draw(st.sampled_from([len(steps) - 2, len(steps) - 1]))
    steps.insert(where, Step("pause", (draw(st.integers(0, size - 1)),)))
    return make_program(steps, size, values)


def _play_late(ctx: RankContext, program: Program) -> Play:
    run: ExpertRun = yield from open_run(ctx, program, BrokenClauses("M14", "M14"))

    def pause(rank: int) -> Play:
        if ctx.rank == rank:
            yield from ctx.pause()

    yield from play_steps(run, program, usual_calls(run, program) | {"pause": pause})
    yield from close_run(run)


def _releasable_stream(traits: Traits) -> str | None:
    """Requires that an operation that failed does not block the device for later cases."""
    communicator = traits.comm_capabilities
    blocks = communicator.stream_ordered and not communicator.abort
    return "abort (of the communicator)" if blocks else None


def _chosen(run: ExpertRun, batch: Batch, home: int) -> bool:
    """Whether a token of this rank chose an expert of rank `home`."""
    per_rank = run.sizes.experts_per_rank
    return any(e // per_rank == home for token in batch.choices[run.ctx.rank] for e in token)


@st.composite
def _generation_programs(draw: st.DrawFn, traits: Traits) -> Program:
    size, values = draw_settings(draw, traits, least_ranks=2)
    choices = distinct_choices(values, size)
    steps: list[Step] = []
    for step in range(draw(st.integers(0, 2))):
        steps += [Step("generation", (step,))]
        steps += [*draw(batch_steps(traits, size, choices)), Step("dispatch")]
    steps += [Step("generation", (draw(st.integers(7, 8)),), rank) for rank in range(size)]
    steps += [*draw(batch_steps(traits, size, choices)), Step("dispatch")]
    return make_program(steps, size, values)


def _play_generations(ctx: RankContext, program: Program) -> Play:
    """Only the last step has ranks of different generations."""
    run: ExpertRun = yield from open_run(ctx, program, BrokenClauses("M15", "M15"))
    upcoming, current = iter(batches(program)), dict[int, int]()
    for step in program.steps:
        if step.op == "generation":
            ranks = range(program.size) if step.rank < 0 else (step.rank,)
            current |= dict.fromkeys(ranks, int(step.args[0]))
            if ctx.rank in ranks:
                run.group.set_generation(current[ctx.rank])
        elif step.op == "dispatch":
            batch = run.make_batch(next(upcoming))
            error = yield from _step(run, batch)
            differ = len(set(current.values())) > 1
            what = f"dispatch {batch.number}, generations {list(current.values())}: {error}"
            require("M15", differ == (error is not None), what)
            if error is None:
                run.judge()
    yield from close_run(run)


# ----- M16: resources -----------------------------------------------------------------------------

CYCLES = 4


def _play_cycles(ctx: RankContext, program: Program) -> Play:
    """The first cycles may fill caches; after them nothing more may be left over."""
    run: ExpertRun = yield from open_run(ctx, program, BrokenClauses("M16", "M16"))
    bases = []
    for _ in range(CYCLES):
        run.dispatches = 0
        yield from play_steps(run, program, usual_calls(run, program))
        ctx.drain()
        yield from meet(run)
        bases.append(dict(ctx.environment.leftovers()))
        yield from meet(run)
    require_no_more("M16", bases[1], bases[-1], f"after {CYCLES - 2} more steps")
    yield from close_run(run)
    run.group.close()
    run = yield from open_run(ctx, program, BrokenClauses("M16", "M16"), "experts again")
    yield from play_steps(run, program, usual_calls(run, program))
    yield from close_run(run)


# ----- the sizes of real models -------------------------------------------------------------------


@st.composite
def _large_programs(draw: st.DrawFn, traits: Traits) -> Program:
    library = declared(traits)
    size = draw(st.sampled_from([n for n in group_sizes(traits) if n <= 4] or group_sizes(traits)))
    per_rank = max(library.experts_per_rank, default=-(-LARGE_EXPERTS // size))
    top_ks = [k for k in library.top_ks or (8,) if k <= size * per_rank] or [size * per_rank]
    values: Values = {
        "experts_per_rank": per_rank,
        "top_k": max(top_ks),
        "hidden": draw(st.sampled_from(library.hidden_sizes or (LARGE_HIDDEN,))),
        "dtype": str(library.dtypes[0]).removeprefix("torch."),
        "replicas": 1,
        "row_capacity": 0,
        "spare": 0,
        "reals": 0,
    }
    steps: list[Step] = []
    seed = draw(st.integers(0, 99))
    for batch in range(2):
        for rank in range(size):
            count = LARGE_BATCHES[(rank + seed) % len(LARGE_BATCHES)] if batch else MAX_LARGE_BATCH
            steps.append(Step("tokens", (count, seed + rank), rank))
        steps += [Step("dispatch"), Step("finish")]
    return make_program(steps, size, values)


def _property(
    name: str,
    clauses: tuple[str, ...],
    claim: str,
    programs: Callable[[Traits], st.SearchStrategy[Program]],
    play: Callable[[RankContext, Program], Play],
    *,
    needs: Requirement = no_requirement,
    judge: Judge = no_comparison,
    **others: Any,
) -> Property:
    return Property(
        name=name,
        family=EXPERT_PARALLEL,
        clauses=clauses,
        claim=claim,
        programs=programs,
        play=play,
        judge=judge,
        needs=all_of(needs_ranks(), needs),
        applies_to=has_library,
        scope=PropertyScope.GROUP,
        **others,
    )


PROPERTIES = (
    _property(
        "a-group-has-the-methods-of-its-protocol",
        ("M17",),
        "A group has the protocol's methods, and a dispatch returns `ReceivedTokens`.",
        lambda traits: round_trips(most=1)(traits),
        _play_methods,
    ),
    _property(
        "combine-is-the-dense-sum",
        ("M1", "M2"),
        "What arrives are the rows that were sent, and what returns is their sum by weight.",
        round_trips(),
        _play_round_trips(BrokenClauses("M2", "M1")),
    ),
    _property(
        "real-numbers-keep-the-declared-precision",
        ("M1",),
        "Sums of real numbers are within what the declared precision allows.",
        round_trips(reals=True),
        _play_round_trips(BrokenClauses("M1", "M1")),
    ),
    _property(
        "many-tokens-arrive-at-many-experts",
        ("M1", "M2"),
        "Batches and numbers of experts as real models have them arrive, and return.",
        lambda traits: _large_programs(traits),
        _play_round_trips(BrokenClauses("M2", "M1")),
        large=True,
    ),
    _property(
        "uneven-loads-arrive-whole",
        ("M3",),
        "All tokens may choose the same experts, and some ranks have no tokens.",
        lambda traits: _uneven_programs(traits),
        _play_round_trips(BrokenClauses("M3", "M3")),
    ),
    _property(
        "padding-and-repeated-experts-count-as-they-are",
        ("M4",),
        "A choice of -1 counts for nothing, and an expert that is chosen twice counts twice.",
        lambda traits: round_trips(_choices_beyond(traits))(traits),
        _play_round_trips(BrokenClauses("M4", "M4")),
        needs=_padding_or_repetition,
    ),
    _property(
        "counts-are-those-of-the-rows",
        ("M5",),
        "The counts told by local expert are those of the rows that arrived.",
        round_trips(),
        _play_counts,
        needs=needs_capability("counts"),
    ),
    _property(
        "what-is-passed-is-only-read",
        ("M6",),
        "Tokens, ids and weights stay as they were, and so do the bytes beside them.",
        lambda traits: round_trips(most=1)(traits),
        _play_guarded,
    ),
    _property(
        "later-launches-may-overwrite-what-was-passed",
        ("M7",),
        "What is launched after a call may overwrite its arguments.",
        round_trips(),
        _play_round_trips(BrokenClauses("M7", "M7"), spoil=True),
    ),
    _property(
        "an-ended-handle-is-refused-or-right",
        ("M8",),
        "A handle that was combined is refused, or gives the result of its own dispatch.",
        lambda traits: _handle_programs(traits),
        _play_handles,
        judge=_same_outcome("M8", "a second combine was refused"),
    ),
    _property(
        "dispatches-in-flight-do-not-mix",
        ("M9",),
        "As many dispatches as are declared may be open, and are combined in any order.",
        lambda traits: _in_flight_programs(traits),
        _play_round_trips(BrokenClauses("M9", "M9")),
        needs=_several_in_flight,
    ),
    _property(
        "lost-ranks-are-left-out",
        ("M10",),
        "Without the ranks that are masked, the others go on, and only their choices count.",
        lambda traits: _mask_programs(traits),
        _play_masks,
        needs=all_of(needs_capability("masks"), needs_ranks(2)),
    ),
    _property(
        "a-captured-step-is-replayed-with-new-contents",
        ("M11",),
        "A replay reads the tokens and choices that its tensors hold by then.",
        lambda traits: _graph_programs(traits),
        _play_graph,
        needs=_graphs,
    ),
    _property(
        "a-batch-that-does-not-fit-is-refused",
        ("M12",),
        "What differs from the configuration raises on its rank, and the next step is right.",
        lambda traits: _misfit_programs(traits),
        _play_misfits,
        needs=needs_capability("checked_batches"),
    ),
    _property(
        "what-exceeds-a-capacity-is-told",
        ("M13",),
        "A step is right, or all ranks are told that it did not fit; the next one is not marked.",
        lambda traits: _capacity_programs(traits),
        _play_capacity,
        needs=needs_capability("row_capacity"),
        judge=_same_outcome("M13", "told by step"),
    ),
    _property(
        "a-rank-that-stays-away-is-told",
        ("M14",),
        "When a rank does not dispatch, or does not combine, the others' step fails in time.",
        lambda traits: _absence_programs(traits),
        _play_absence,
        needs=all_of(needs_capability("deadline"), needs_ranks(2), _releasable_stream),
        deadline=DeadlineLength.SHORT,
    ),
    _property(
        "a-late-rank-is-waited-for",
        ("M14",),
        "A rank that is late by less than the deadline makes no step fail.",
        lambda traits: _late_programs(traits),
        _play_late,
        needs=all_of(needs_capability("deadline"), needs_ranks(2), _releasable_stream),
        deadline=DeadlineLength.SHORT,
    ),
    _property(
        "ranks-of-different-generations-are-told",
        ("M15",),
        "A step whose ranks route by different tables fails on all of them, and no other does.",
        lambda traits: _generation_programs(traits),
        _play_generations,
        needs=all_of(needs_capability("generations"), needs_ranks(2)),
    ),
    _property(
        "steps-leak-nothing",
        ("M16",),
        "After more steps nothing more is left over; a group closes twice, and opens again.",
        round_trips(most=1),
        _play_cycles,
    ),
)
