"""The tables of `equipoise simulate`, 100 columns wide."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from equipoise.report.forecast_table import counted
from equipoise.report.ink import Ink, Tint, paint
from equipoise.report.simulation.columns import BY_FIGURE, COLUMNS, REPORT_ONLY, Column
from equipoise.report.simulation.judged import Judged, alike_lines, judge
from equipoise.report.simulation.simulated import Simulated
from equipoise.report.simulation.sweep_table import sweep_lines
from equipoise.report.simulation.words import about_lines, folded

WIDTH = 100
BEST = "*"


@dataclass(frozen=True)
class Filled:
    """A column with its texts, one for each contender.

    Attributes:
        column: which.
        texts: behind each other's ends the mark of the best, or a blank.
        best: which row is the best; None where none is.
    """

    column: Column
    texts: tuple[str, ...]
    best: int | None

    @property
    def width(self) -> int:
        """With two blanks before it."""
        return 2 + max(map(len, (self.column.head + " ", self.column.unit + " ", *self.texts)))


def render(found: Simulated, ink: Ink) -> str:
    """Everything; no line is wider than `WIDTH`, save where a name is."""
    judged = judge(found.results)
    parts = [
        list(about_lines(found, ink)),
        *(_block(found.labels, block, ink) for block in _blocks(found, judged)),
        list(_notes(found, judged)),
    ]
    if found.sweep is not None:
        parts.append(list(sweep_lines(found.sweep, ink)))
    return "\n\n".join("\n".join(lines) for lines in parts)


def fill(found: Simulated, judged: Sequence[Judged]) -> Iterator[Filled]:
    """Every column of the table, in order."""
    best = {one.column.figure: found.labels.index(one.best) for one in judged}
    for plain in COLUMNS:
        column = plain.fitted(found.results)
        decimals, place = column.decimals(found.results), best.get(column.figure)
        texts = (column.cell(r.interval(column.figure), decimals) for r in found.results)
        marked = (t + (BEST if row == place else " ") for row, t in enumerate(texts))
        yield Filled(column, tuple(marked), place)


def _blocks(found: Simulated, judged: Sequence[Judged]) -> list[list[Filled]]:
    """As many columns beside each other as there is room for."""
    blocks: list[list[Filled]] = [[]]
    for filled in fill(found, judged):
        if filled.column.figure in REPORT_ONLY or _nobody_failed(found, filled.column):
            continue
        taken = _names(found.labels) + sum(one.width for one in blocks[-1])
        if blocks[-1] and taken + filled.width > WIDTH:
            blocks.append([])
        blocks[-1].append(filled)
    return blocks


def _nobody_failed(found: Simulated, column: Column) -> bool:
    return column.figure == "failed" and all(
        result.interval("failed").mean == 0 for result in found.results
    )


def _names(labels: Sequence[str]) -> int:
    return max(len(label) for label in labels)


def _block(labels: Sequence[str], block: Sequence[Filled], ink: Ink) -> list[str]:
    space = _names(labels)
    heads = "".join(f"{one.column.head + ' ':>{one.width}}" for one in block)
    units = "".join(f"{one.column.unit + ' ':>{one.width}}" for one in block)
    lines = [paint((" " * space + words).rstrip(), Tint.DIM, ink) for words in (heads, units)]
    for row, label in enumerate(labels):
        cells = (_cell(one, row, ink) for one in block)
        lines.append(f"{label:<{space}}{''.join(cells)}".rstrip())
    return lines


def _cell(filled: Filled, row: int, ink: Ink) -> str:
    text = f"{filled.texts[row]:>{filled.width}}"
    return paint(text, Tint.GREEN, ink) if row == filled.best else text


def _notes(found: Simulated, judged: Sequence[Judged]) -> Iterator[str]:
    failed = "; no request failed" if _nobody_failed(found, BY_FIGURE["failed"]) else ""
    yield f"{BEST} best of its column; the page Metrics says what each is{failed}"
    if len(found.seeds) == 1:
        yield "one seed: no intervals, and no difference can be told from chance"
        return
    seeds = counted(len(found.seeds), "seed")
    yield f"\u00b1 half of the 95 % confidence interval over {seeds} (Student's t)"
    for line in alike_lines(found, [j for j in judged if j.column.figure not in REPORT_ONLY]):
        yield from folded(line, WIDTH)
