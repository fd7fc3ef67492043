"""The tables of `equipoise simulate`, 100 columns wide, and texts that the report shares."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from equipoise.balancer.requests.cluster import Cluster
from equipoise.report.simulation.columns import (
    BY_FIGURE,
    COLUMNS,
    REPORT_ONLY,
    ColumnBest,
    FigureColumn,
    best_of_columns,
    indistinguishable_lines,
)
from equipoise.report.simulation.result import SimulationResult, SimulationSubject, Sweep
from equipoise.report.terminal import ColourMode, TextStyle, styled
from equipoise.report.text import pluralize, printable

WIDTH = 100


def about_lines(comparison: SimulationResult, colours: ColourMode) -> Iterator[str]:
    """Head of the table."""
    subject = comparison.subject
    yield styled(title(comparison), TextStyle.BOLD, colours)
    facts = (*subject_facts(subject), *subject.notes)
    for fact in facts:
        for line in wrap_lines(printable(fact), WIDTH):
            yield styled(line, TextStyle.DIM, colours)


def title(comparison: SimulationResult) -> str:
    """Who serves what."""
    requests = pluralize(comparison.subject.requests.count, "request")
    policies = f"{len(comparison.results)} polic{'y' if len(comparison.results) == 1 else 'ies'}"
    subject = f"{requests} on {describe_workers(comparison.subject.cluster)}"
    seeds = pluralize(len(comparison.seeds), "seed")
    return f"{printable(comparison.subject.workload)}: {subject}; {policies}, {seeds}"


def describe_workers(cluster: Cluster) -> str:
    """How many, and how large."""
    room = "" if cluster.kv_tokens is None else f" and {cluster.kv_tokens:,} KV tokens"
    counts = Counter(cluster.worker_slots)
    if len(counts) == 1:
        slots = pluralize(cluster.worker_slots[0], "slot")
        return f"{pluralize(cluster.workers, 'worker')} of {slots}{room}"
    kinds = ", ".join(f"{number} of {slots}" for slots, number in sorted(counts.items()))
    return f"{cluster.workers} workers, {kinds} slots{room}"


def subject_facts(subject: SimulationSubject) -> tuple[str, ...]:
    """A line each: requests, seeds, arrivals, step."""
    prompts, outputs = subject.requests.prompts, subject.requests.outputs
    return (
        f"prompts of {prompts.mean:,.0f} tokens (P95 {prompts.p95:,.0f}), outputs of "
        f"{outputs.mean:,.0f} (P95 {outputs.p95:,.0f})",
        subject.sampling,
        subject.arrivals,
        describe_step(subject),
        *describe_prefill(subject.cluster),
    )


def describe_step(subject: SimulationSubject) -> str:
    """How long a step takes."""
    step = subject.cluster.step
    full = step.seconds(subject.full_load)
    rates = f"{step.per_token * 1e9:.3g} ns for each token of the fullest worker"
    if step.per_mean:
        rates += f" and {step.per_mean * 1e9:.3g} ns for each of the mean"
    return (
        f"a step takes {step.fixed * 1e3:.3g} ms and {rates}: {full * 1e3:.3g} ms with all slots "
        f"taken, {step.fixed / full:.0%} of it fixed; capacity {subject.capacity:.3g} requests/s"
    )


def describe_prefill(cluster: Cluster) -> tuple[str, ...]:
    """What workers compute of prompts, and when."""
    prefill = cluster.prefill
    if prefill is None:
        return ()
    when = ""
    if prefill.alignment is not None:
        rule, limit = prefill.alignment.rule.value, prefill.alignment.limit
        when = f", aligned as by {rule} ({pluralize(limit, 'step')})"
    return (
        f"prompts are computed beside decoding, {prefill.chunk:,} tokens a step at most; one token "
        f"takes as long as {cluster.step.prompt_weight:g} KV tokens to read{when}",
    )


def capitalised(text: str) -> str:
    """With a capital."""
    return text[:1].upper() + text[1:]


def wrap_lines(text: str, width: int) -> list[str]:
    """In lines, set in from the second on."""
    return textwrap.wrap(text, width, subsequent_indent="    ", drop_whitespace=True) or [""]


SWEEP_FIGURES = {"load": ("idle", "throughput", "wait_p99"), "workers": ("idle", "gap", "wait_p99")}
"""By what is swept: figures that are shown."""
SWEEP_NAMES = {"load": "load", "workers": "workers"}


def sweep_lines(sweep: Sweep, colours: ColourMode) -> Iterator[str]:
    """A block for each figure, means only."""
    for place, figure in enumerate(SWEEP_FIGURES[sweep.over]):
        if place:
            yield ""
        yield from _sweep_block(sweep, figure, colours)


def sweep_cells(sweep: Sweep, figure: str) -> dict[str, tuple[str, ...]]:
    """By label, the means at every point."""
    column = BY_FIGURE[figure]
    decimals = column.decimals([result for point in sweep.points for result in point.results])
    labels = [result.named_policy.label for result in sweep.points[0].results]
    return {
        label: tuple(
            _mean(column.scale * point.results[place].interval(figure).mean, decimals)
            for point in sweep.points
        )
        for place, label in enumerate(labels)
    }


def _sweep_block(sweep: Sweep, figure: str, colours: ColourMode) -> Iterator[str]:
    column, cells = BY_FIGURE[figure], sweep_cells(sweep, figure)
    heads = [f"{point.value:g}" for point in sweep.points]
    space = max(len(label) for label in cells)
    wide = 2 + max(len(text) for row in (heads, *cells.values()) for text in row)
    yield styled(
        f"{column.head}, {column.unit}, by {SWEEP_NAMES[sweep.over]}", TextStyle.BOLD, colours
    )
    yield styled(" " * space + "".join(f"{head:>{wide}}" for head in heads), TextStyle.DIM, colours)
    for label, row in cells.items():
        yield f"{label:<{space}}" + "".join(f"{text:>{wide}}" for text in row)


def _mean(value: float, decimals: int) -> str:
    return "-" if value != value else f"{value:,.{decimals}f}"


BEST_MARK = "*"


@dataclass(frozen=True)
class FilledColumn:
    """A column with its texts, one for each contender.

    Attributes:
        column: which.
        texts: each ends with the mark of the best, or a blank.
        best: which row is the best; None where none is.
    """

    column: FigureColumn
    texts: tuple[str, ...]
    best: int | None

    @property
    def width(self) -> int:
        """With two blanks before it."""
        return 2 + max(map(len, (self.column.head + " ", self.column.unit + " ", *self.texts)))


def render(comparison: SimulationResult, colours: ColourMode) -> str:
    """Everything; no line is wider than `WIDTH`, save where a name is."""
    best = best_of_columns(comparison.results)
    parts = [
        list(about_lines(comparison, colours)),
        *(_column_block(comparison.labels, block, colours) for block in _blocks(comparison, best)),
        list(_notes(comparison, best)),
    ]
    if comparison.sweep is not None:
        parts.append(list(sweep_lines(comparison.sweep, colours)))
    return "\n\n".join("\n".join(lines) for lines in parts)


def fill_columns(
    comparison: SimulationResult, best: Sequence[ColumnBest]
) -> Iterator[FilledColumn]:
    """Every column of the table, in order."""
    best_rows = {one.column.figure: comparison.labels.index(one.best) for one in best}
    for plain in COLUMNS:
        column = plain.fitted(comparison.results)
        decimals, place = column.decimals(comparison.results), best_rows.get(column.figure)
        texts = (column.cell(r.interval(column.figure), decimals) for r in comparison.results)
        marked = (t + (BEST_MARK if row == place else " ") for row, t in enumerate(texts))
        yield FilledColumn(column, tuple(marked), place)


def _blocks(simulation: SimulationResult, best: Sequence[ColumnBest]) -> list[list[FilledColumn]]:
    """As many columns side by side as there is room for."""
    blocks: list[list[FilledColumn]] = [[]]
    for filled in fill_columns(simulation, best):
        if filled.column.figure in REPORT_ONLY or _nobody_failed(simulation, filled.column):
            continue
        row_width = _names(simulation.labels) + sum(one.width for one in blocks[-1])
        if blocks[-1] and row_width + filled.width > WIDTH:
            blocks.append([])
        blocks[-1].append(filled)
    return blocks


def _nobody_failed(simulation: SimulationResult, column: FigureColumn) -> bool:
    return column.figure == "failed" and all(
        result.interval("failed").mean == 0 for result in simulation.results
    )


def _names(labels: Sequence[str]) -> int:
    return max(len(label) for label in labels)


def _column_block(
    labels: Sequence[str], block: Sequence[FilledColumn], colours: ColourMode
) -> list[str]:
    space = _names(labels)
    heads = "".join(f"{one.column.head + ' ':>{one.width}}" for one in block)
    units = "".join(f"{one.column.unit + ' ':>{one.width}}" for one in block)
    lines = [
        styled((" " * space + words).rstrip(), TextStyle.DIM, colours) for words in (heads, units)
    ]
    for row, label in enumerate(labels):
        cells = (_cell(one, row, colours) for one in block)
        lines.append(f"{label:<{space}}{''.join(cells)}".rstrip())
    return lines


def _cell(filled: FilledColumn, row: int, colours: ColourMode) -> str:
    text = f"{filled.texts[row]:>{filled.width}}"
    return styled(text, TextStyle.GREEN, colours) if row == filled.best else text


def _notes(simulation: SimulationResult, best: Sequence[ColumnBest]) -> Iterator[str]:
    failed = "; no request failed" if _nobody_failed(simulation, BY_FIGURE["failed"]) else ""
    yield f"{BEST_MARK} best of its column; the page Metrics says what each is{failed}"
    if len(simulation.seeds) == 1:
        yield "one seed: no intervals, and no difference can be told from chance"
        return
    seeds = pluralize(len(simulation.seeds), "seed")
    yield f"\u00b1 half of the 95 % confidence interval over {seeds} (Student's t)"
    for line in indistinguishable_lines(
        simulation, [j for j in best if j.column.figure not in REPORT_ONLY]
    ):
        yield from wrap_lines(line, WIDTH)
