"""The table of `equipoise advise`, 80 columns wide: answers first, their inputs last."""

from collections.abc import Iterator
from textwrap import fill

from equipoise.report.advice.advice import Advice, MigrationAdvice
from equipoise.report.advice.inputs import AdviceInputs, step_rows
from equipoise.report.advice.migration_cost import break_even
from equipoise.report.advice.sizing import RankChoice, RankChoices, SlotChoice
from equipoise.report.advice.worth import ServingOption, Verdict, Worth, rows_saved, time_saved
from equipoise.report.terminal import ColourMode, TextStyle, styled
from equipoise.report.text import format_number, format_size, pluralize

WIDTH = 80


def basis_lines(advice: Advice) -> Iterator[str]:
    """Lines of a name and what it is."""
    question, split = advice.question, advice.split
    yield _basis_line("load", _load(advice))
    source = "as asked for" if question.step_rows else "a window is taken for a step"
    yield _basis_line("step", f"{step_rows(question, split):,} rows of a layer, {source}")
    runs = "experts in their order, one replica each" if question.installed is None else "installed"
    yield _basis_line("now", runs)
    yield _basis_line("target", f"imbalance {question.target:g} on the rows planned on")
    yield _basis_line("expert", _expert(question))
    yield _basis_line("hardware", _hardware(question))
    yield _basis_line("latency", _latency(question))


def _load(advice: Advice) -> str:
    split = advice.split
    windows = advice.question.statistics.windows
    rows = f"{split.rows:,} rows of a layer each"
    if not split.held_out:
        return f"one window, {rows}: measured on what was planned on"
    train_windows, test_windows = split.train.windows, split.test.windows
    return (
        f"{windows} windows, {rows}: planned on {train_windows}, measured on {test_windows} later"
    )


def _expert(question: AdviceInputs) -> str:
    if question.expert is None:
        return "unknown; --expert-bytes, or --hidden and --intermediate"
    operations = question.expert.operations_per_row
    return (
        f"{format_size(question.expert.size)} in {question.expert.precision}, "
        f"{operations / 1e6:,.1f} million operations a row"
    )


def _hardware(question: AdviceInputs) -> str:
    if question.hardware is None:
        return "unknown; --hardware"
    values = question.hardware.figures
    figures = ", ".join(f"{key} {value:g}" for key, value in values.items())
    return f"{question.hardware.name}: {figures}; --json has the source of each"


def _latency(question: AdviceInputs) -> str:
    if question.latency is None:
        return "unknown; --itl"
    shares = f"experts may take {question.moe_share:.0%} of it"
    memory = f"{question.memory_share:.0%} of memory"
    link = f"weights come over the {question.link} link"
    return f"{question.latency * 1e3:g} ms; {shares} and {memory}; {link}"


def _basis_line(name: str, text: str) -> str:
    return fill(text, WIDTH, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12)


NAME, COLUMN = 20, 10
MISSING = "-"


def render(advice: Advice, colours: ColourMode) -> str:
    """The whole table."""
    parts = [
        _title(advice),
        _worth(advice.worth, advice.question),
        _redundancy(advice),
        _widths(advice.rank_choices),
        _movement(advice.migration),
        iter(["It rests on", *basis_lines(advice)]),
    ]
    return "\n\n".join("\n".join(_painted(lines, colours)) for lines in parts)


def _painted(lines: Iterator[str], colours: ColourMode) -> Iterator[str]:
    """The first line is the heading; what is set in far is the heads of columns, or a note."""
    yield styled(next(lines), TextStyle.BOLD, colours)
    for line in lines:
        yield (
            styled(line, TextStyle.DIM, colours)
            if line.startswith(("  " + " " * 2, "  ("))
            else line
        )


def _title(advice: Advice) -> Iterator[str]:
    statistics, ranks = advice.question.statistics, advice.question.ranks
    experts = pluralize(statistics.experts, "expert")
    layers = pluralize(len(statistics.layers), "layer")
    yield f"{layers} of {experts} in {advice.slots:,} slots on {pluralize(ranks, 'rank')}"
    yield "a model, not a measurement"


def _worth(worth: Worth, question: AdviceInputs) -> Iterator[str]:
    subject = "balancing" if question.installed is None else "another plan"
    yield f"1. Is {subject} worth it?  {worth.verdict}"
    subject = "rows" if worth.now.seconds is None else "time"
    yield f"  the plan changes the {subject} of the slowest rank by {_change(-worth.gain)}"
    yield _table_line("", "planned", "measured", "worst", "rows", "time")
    for way in worth.options:
        yield _way(way, worth.now)
    yield _table_line("  chance alone", MISSING, format_number(worth.floor))
    if worth.greedy_gain:
        yield f"  greedy saves {worth.greedy_gain:.1%} of the slowest rank's rows beside the plan:"
        yield "  plan --policy greedy --split even"
    if worth.few_rows is not None:
        rows = f"{worth.few_rows:,.3g} rows of an expert in a step"
        yield f"  {rows} are few: to read weights may take longer"
        yield "  than to compute, and then time counts, not rows"


def _way(way: ServingOption, now: ServingOption) -> str:
    planned = MISSING if way.planned is None else format_number(way.planned)
    rows = time = MISSING
    if way is not now:
        rows = _change(-rows_saved(now.mean, way.mean))
        time = MISSING if way.seconds is None else _change(-time_saved(now, way))
    return _table_line(
        f"  {way.name}", planned, format_number(way.mean), format_number(way.worst), rows, time
    )


def _redundancy(advice: Advice) -> Iterator[str]:
    slot_choices = advice.slot_choices
    yield f"2. How many redundant slots?  {_slots(advice)}"
    if advice.worth.verdict is Verdict.WORTH:
        yield f"  {slot_choices.reason}"
    yield _table_line("", "slots", "connected", "planned", "measured", "weights", "time")
    for choice in slot_choices.choices:
        yield _choice(choice)


def _slots(advice: Advice) -> str:
    choices, installed = advice.slot_choices, advice.question.installed
    if advice.worth.verdict is not Verdict.WORTH and installed is not None:
        return f"as installed: {installed.slots:,} slots"
    if advice.worth.verdict is not Verdict.WORTH:
        return "none, since balancing is not worth it"
    more = choices.advised.per_rank - choices.choices[0].per_rank
    return f"{more or 'none'} on each rank: {choices.advised.slots:,} slots"


def _choice(choice: SlotChoice) -> str:
    return _table_line(
        f"  {choice.per_rank} on a rank",
        f"{choice.slots:,}",
        "yes" if choice.connected else "no",
        format_number(choice.planned),
        format_number(choice.measured),
        MISSING if choice.extra_bytes is None else f"+{format_size(choice.extra_bytes)}",
        _milliseconds(choice.seconds),
    )


def _widths(choices: RankChoices) -> Iterator[str]:
    yield f"3. On how many ranks?  {_ranks(choices)}"
    yield "  the same rows of a step on each, planned anew"
    yield _table_line("", "slots", "measured", "weights", "memory", "time", "itl")
    for one in choices.choices:
        yield _width(one)


def _ranks(choices: RankChoices) -> str:
    if choices.judged_by == "nothing":
        return "not said: needs --hardware and what an expert weighs"
    if choices.advised is None:
        return f"none of these fits {choices.judged_by}"
    return f"{choices.advised.ranks}, the fewest that fit {choices.judged_by}"


def _width(one: RankChoice) -> str:
    return _table_line(
        f"  {pluralize(one.ranks, 'rank')}",
        str(one.per_rank),
        format_number(one.measured),
        MISSING if one.weight_bytes is None else format_size(one.weight_bytes),
        MISSING if one.memory is None else f"{one.memory:.1%}",
        _milliseconds(one.seconds),
        MISSING if one.latency is None else f"{one.latency:.1%}",
    )


def _movement(migration: MigrationAdvice | None) -> Iterator[str]:
    yield "4. How fast do experts move, and when does it pay?"
    if migration is None:
        yield "  not said: needs --hardware, --itl and what an expert weighs"
        return
    pace = migration.pace
    yield f"  {pluralize(pace.experts_per_step, 'expert')} in a step of {pace.latency * 1e3:g} ms"
    yield _table_line("", "copies", "busiest", "steps", "time", "paused", "by layer")
    for one in migration.moves:
        yield _table_line(
            f"  {one.name}",
            f"{one.copies:,}",
            f"{one.busiest:,}",
            f"{one.steps:,}",
            _milliseconds(one.steps * pace.latency),
            _milliseconds(one.bulk_stall),
            _milliseconds(one.layer_stall),
        )
    yield from _pays(migration)


def _pays(migration: MigrationAdvice) -> Iterator[str]:
    if migration.saved <= 0:
        yield f"  the plan costs {_milliseconds(abs(migration.saved))} a step: its moves never pay"
        return
    plan, saved = migration.moves[0], _milliseconds(migration.saved)
    paused, layered = _after(plan.bulk_stall, migration), _after(plan.layer_stall, migration)
    yield f"  the plan saves {saved} a step; its moves pay {paused} where serving"
    yield f"  pauses for them, {layered} where they go layer by layer beside it"


def _after(stall: float, migration: MigrationAdvice) -> str:
    steps = break_even(stall, migration.saved)
    return f"after {pluralize(steps, 'step')}" if steps else "at once"


def _change(part: float) -> str:
    """A part of something, more or less; no sign where it rounds to nothing."""
    text = f"{part:+.1%}"
    return text if text.strip("+-0.%") else "0.0%"


def _milliseconds(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{seconds * 1e3:,.2f} ms"


def _table_line(name: str, *texts: str) -> str:
    return (f"{name:<{NAME}}" + "".join(f" {text:>{COLUMN - 1}}" for text in texts)).rstrip()
