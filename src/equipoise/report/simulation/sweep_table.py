"""The table of a sweep: one line for each contender, one column for each point."""

from collections.abc import Iterator

from equipoise.report.ink import Ink, Tint, paint
from equipoise.report.simulation.columns import BY_FIGURE
from equipoise.report.simulation.simulated import Sweep

SHOWN = {"load": ("idle", "throughput", "wait_p99"), "workers": ("idle", "gap", "wait_p99")}
"""By what is swept: figures that are shown."""
NAMES = {"load": "load", "workers": "workers"}


def sweep_lines(sweep: Sweep, ink: Ink) -> Iterator[str]:
    """A block for each figure, means only."""
    for place, figure in enumerate(SHOWN[sweep.over]):
        if place:
            yield ""
        yield from _block(sweep, figure, ink)


def sweep_cells(sweep: Sweep, figure: str) -> dict[str, tuple[str, ...]]:
    """By label, the means at every point."""
    column = BY_FIGURE[figure]
    decimals = column.decimals([result for point in sweep.points for result in point.results])
    labels = [result.contender.label for result in sweep.points[0].results]
    return {
        label: tuple(
            _mean(column.scale * point.results[place].interval(figure).mean, decimals)
            for point in sweep.points
        )
        for place, label in enumerate(labels)
    }


def _block(sweep: Sweep, figure: str, ink: Ink) -> Iterator[str]:
    column, cells = BY_FIGURE[figure], sweep_cells(sweep, figure)
    heads = [f"{point.value:g}" for point in sweep.points]
    space = max(len(label) for label in cells)
    wide = 2 + max(len(text) for row in (heads, *cells.values()) for text in row)
    yield paint(f"{column.head}, {column.unit}, by {NAMES[sweep.over]}", Tint.BOLD, ink)
    yield paint(" " * space + "".join(f"{head:>{wide}}" for head in heads), Tint.DIM, ink)
    for label, row in cells.items():
        yield f"{label:<{space}}" + "".join(f"{text:>{wide}}" for text in row)


def _mean(value: float, decimals: int) -> str:
    return "-" if value != value else f"{value:,.{decimals}f}"
