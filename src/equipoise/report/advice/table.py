"""The table of `equipoise advise`, 80 columns wide: answers first, their inputs last."""

from collections.abc import Iterable, Iterator, Sequence
from textwrap import fill

from equipoise.report.advice.advice import Advice, MigrationAdvice
from equipoise.report.advice.inputs import AdviceInputs, step_rows
from equipoise.report.advice.migration_cost import break_even
from equipoise.report.advice.sizing import RankChoice, RankChoices, SlotChoice
from equipoise.report.advice.worth import ServingOption, Verdict, Worth, rows_saved, time_saved
from equipoise.report.placement.spread import mean_known
from equipoise.report.terminal import ColourMode, TextStyle, styled
from equipoise.report.text import format_number, format_size, pluralize

WIDTH = 80
RANKS_OF_A_MACHINE = 8
"""Accelerators of a usual machine."""


def basis_lines(advice: Advice) -> Iterator[str]:
    """Lines of a name and what it is."""
    question, split = advice.question, advice.split
    yield _basis_line("load", _load(advice))
    source = "as given or recorded" if question.step_rows else "a window is taken for a step"
    yield _basis_line("step", f"{step_rows(question, split):,} rows of a layer, {source}")
    runs = "experts in their order, one replica each" if question.installed is None else "installed"
    yield _basis_line("now", runs)
    yield _basis_line(
        "target", f"imbalance {question.target:g}: no slots to go below, nor into the dead zone"
    )
    yield _basis_line("expert", _expert(question))
    yield _basis_line("hardware", _hardware(question))
    yield _basis_line("latency", _latency(question))
    yield _basis_line("dead zone", _dead_zone(question))
    yield _basis_line("KV cache", _kv_cache(question))


def _load(advice: Advice) -> str:
    split = advice.split
    windows = advice.question.statistics.windows
    if not split.held_out:
        return f"one window, {split.rows:,} rows of a layer: measured on what was planned on"
    train_windows, test_windows = split.train.windows, split.test.windows
    return (
        f"{windows} windows: planned on {train_windows}, measured on {test_windows} later "
        f"(there {split.rows:,} rows of a layer on average)"
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
    if question.link == "node" and question.ranks > RANKS_OF_A_MACHINE:
        link += " (several machines: --link network)"
    return f"{question.latency * 1e3:g} ms; {shares} and {memory}; {link}"


def _dead_zone(question: AdviceInputs) -> str:
    zone = question.zone
    return (
        f"a step takes equally long up to an imbalance of {zone.knee - 1:.3g}, then "
        f"{zone.slope:.1%} longer for each 1.0 more: {zone.source}"
    )


def _kv_cache(question: AdviceInputs) -> str:
    cache, expert = question.kv_cache, question.expert
    if cache is None or expert is None:
        return "unknown; --kv-bytes-per-token and --memory"
    weights = format_size(question.weight_bytes(expert, question.slots_now))
    bound = "it bounds the requests that run"
    if question.kv_usage < 1:
        bound = f"{question.kv_usage:.0%} of it is in use at most"
    return (
        f"{question.kv_tokens(question.slots_now):,} tokens of {format_size(cache.bytes_per_token)}"
        f" on a rank now, beside {weights} of expert weights; {bound}"
    )


def _basis_line(name: str, text: str) -> str:
    return fill(text, WIDTH, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12)


NAME, COLUMN = 20, 10
MISSING = "-"


def render(advice: Advice, colours: ColourMode) -> str:
    """The whole table."""
    decision = fill(advice.decision.sentence, WIDTH).splitlines()
    parts = [
        _title(advice),
        _worth(advice.worth, advice.question),
        _redundancy(advice),
        _widths(advice.rank_choices, advice.question),
        _movement(advice.migration, advice.question),
        iter(["It rests on", *basis_lines(advice)]),
    ]
    texts = ["\n".join(styled(line, TextStyle.BOLD, colours) for line in decision)]
    texts += ["\n".join(_painted(lines, colours)) for lines in parts]
    return "\n\n".join(texts)


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
    plan = "the plan changes" if worth.best is worth.planned else "plans of the last window change"
    yield f"  {plan} step time by {_change(worth.best.step / worth.now.step - 1)}"
    yield from _columns(
        "",
        ("planned", "measured", "worst", "rows", "time", "step"),
        ((way.name, _way(way, worth.now)) for way in worth.options),
    )
    yield _table_line("  chance alone", MISSING, format_number(worth.floor))
    if worth.greedy_gain:
        yield f"  greedy saves {worth.greedy_gain:.1%} of the slowest rank's rows beside the plan:"
        yield "  plan --policy greedy --split even"
    if worth.few_rows is not None:
        rows = f"{worth.few_rows:,.3g} rows of an expert in a step"
        yield f"  {rows} are few: to read weights may take longer"
        yield "  than to compute, and then time counts, not rows"


def _way(way: ServingOption, now: ServingOption) -> tuple[str, ...]:
    planned = MISSING if way.planned is None else format_number(way.planned)
    rows = time = step = MISSING
    if way is not now:
        before = way.before or now
        rows = _change(-rows_saved(before.mean, way.mean))
        saved = time_saved(before, way)
        time = MISSING if saved is None else _change(-saved)
        step = _change(way.step / before.step - 1)
    return planned, format_number(way.mean), format_number(way.worst), rows, time, step


def _redundancy(advice: Advice) -> Iterator[str]:
    slot_choices = advice.slot_choices
    yield f"2. How many redundant slots?  {_slots(advice)}"
    if advice.worth.verdict is Verdict.WORTH:
        yield f"  {slot_choices.reason}"
    yield from _columns(
        "slots",
        ("connected", "measured", "weights", "time", "KV tokens", "throughput"),
        (
            (f"{one.slots:,} ({one.per_rank:,} a rank)", _choice(one))
            for one in slot_choices.choices
        ),
    )
    yield from _layers(advice)


def _layers(advice: Advice) -> Iterator[str]:
    """Slots by layer, where enough layers could do without redundant ones."""
    choices = advice.slot_choices
    if choices.layers_that_gain is None:
        return
    total = len(advice.question.statistics.layers)
    gain = len(choices.layers_that_gain)
    spared = ""
    if choices.advised.extra_bytes is not None:
        size = choices.advised.extra_bytes * (total - gain) / total
        spared = f" ({format_size(size)} of a rank)"
    yield from _note(
        f"only {gain} of {total} layers gain by theirs, which --json names; slots by layer would "
        f"spare those of the others{spared}, but most engines take one number for all layers"
    )


def _note(text: str) -> list[str]:
    return fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ").splitlines()


def _slots(advice: Advice) -> str:
    choices, installed = advice.slot_choices, advice.question.installed
    if advice.worth.verdict is not Verdict.WORTH and installed is not None:
        return f"as installed: {installed.slots:,} slots"
    if advice.worth.verdict is not Verdict.WORTH:
        return "none, since balancing is not worth it"
    more = choices.advised.per_rank - choices.choices[0].per_rank
    slots = f"{choices.advised.slots:,} slots"
    return f"{more} on each rank: {slots}" if more else f"none: {slots}"


def _choice(choice: SlotChoice) -> tuple[str, ...]:
    return (
        "yes" if choice.connected else "no",
        format_number(mean_known(choice.measured)),
        MISSING if choice.extra_bytes is None else f"+{format_size(choice.extra_bytes)}",
        _milliseconds(choice.seconds),
        MISSING if choice.kv_tokens is None else f"{choice.kv_tokens:,}",
        _change(choice.throughput - 1),
    )


def _widths(choices: RankChoices, question: AdviceInputs) -> Iterator[str]:
    yield f"3. On how many ranks?  {_ranks(choices, question)}"
    yield "  the same rows of a step on each, planned anew"
    yield from _columns(
        "",
        ("slots each", "measured", "weights", "memory", "time", "itl"),
        ((pluralize(one.ranks, "rank"), _width(one)) for one in choices.choices),
    )


def _ranks(choices: RankChoices, question: AdviceInputs) -> str:
    if choices.judged_by == "nothing":
        return f"not said: {_missing(question, '--hardware', '--expert-bytes')}"
    if choices.advised is None:
        return f"none of these fits {choices.judged_by}"
    return f"{choices.advised.ranks}, the fewest that fit {choices.judged_by}"


def _width(one: RankChoice) -> tuple[str, ...]:
    return (
        str(one.per_rank),
        format_number(one.measured),
        MISSING if one.weight_bytes is None else format_size(one.weight_bytes),
        MISSING if one.memory is None else f"{one.memory:.1%}",
        _milliseconds(one.seconds),
        MISSING if one.latency is None else f"{one.latency:.1%}",
    )


def _missing(question: AdviceInputs, *options: str) -> str:
    """Which of these options, that an answer needs, were not given."""
    values = {
        "--hardware": question.hardware,
        "--itl": question.latency,
        "--expert-bytes": question.expert,
    }
    return "needs " + " and ".join(name for name in options if values[name] is None)


def _movement(migration: MigrationAdvice | None, question: AdviceInputs) -> Iterator[str]:
    yield "4. How fast do experts move, and when does it pay?"
    if migration is None:
        yield f"  not said: {_missing(question, '--hardware', '--itl', '--expert-bytes')}"
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


def _columns(
    title: str, heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]
) -> Iterator[str]:
    """A line of heads and one for each name; columns of which nothing is known are left out."""
    lines = list(rows)
    known = [
        place for place in range(len(heads)) if any(texts[place] != MISSING for _, texts in lines)
    ]
    texts_by_place = list(zip(heads, *(texts for _, texts in lines), strict=True))
    widths = [max(COLUMN, *(len(text) + 1 for text in texts_by_place[place])) for place in known]
    first = min(NAME, WIDTH - sum(widths))
    lines.insert(0, (f"  {title}" if title else "", heads))
    for name, texts in lines:
        cells = (f"{texts[place]:>{width}}" for place, width in zip(known, widths, strict=True))
        yield (f"  {name}".ljust(first) + "".join(cells)).rstrip()


def _table_line(name: str, *texts: str) -> str:
    return (f"{name:<{NAME}}" + "".join(f" {text:>{COLUMN - 1}}" for text in texts)).rstrip()
