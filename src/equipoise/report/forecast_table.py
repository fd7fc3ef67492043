"""The table that `equipoise plan` ends with, 80 columns wide."""

from math import isnan

import numpy as np

from equipoise.report.forecast import Forecast
from equipoise.report.ink import Ink, Tint, paint
from equipoise.report.spread import Reals, mean_known

WIDTHS = 14, 12, 12, 12
COLUMNS = "", "imbalance", "worst", "in layer"
NAMES = {"even_split": "  split evenly", "bound": "lower bound"}


def render(forecast: Forecast, ink: Ink) -> str:
    """The whole table; its last line says what has to move."""
    lines = [
        paint(_title(forecast), Tint.BOLD, ink),
        paint(_source(forecast), Tint.DIM, ink),
        "",
        paint(_aligned(COLUMNS), Tint.DIM, ink),
        _row(forecast, forecast.before_name, forecast.before),
    ]
    for name, values in forecast.curves.items():
        row = _row(forecast, NAMES.get(name, name), values)
        lines.append(paint(row, Tint.BOLD, ink) if name == "planned" else row)
    return "\n".join([*lines, "", _moves(forecast)])


def _title(forecast: Forecast) -> str:
    layout = forecast.layout
    return (
        f"{counted(len(layout.layers), 'layer')} of {counted(layout.experts, 'expert')} "
        f"in {counted(layout.slots, 'slot')} on {counted(layout.ranks, 'rank')}"
    )


def _source(forecast: Forecast) -> str:
    windows = counted(forecast.windows, "window") + (", summed" if forecast.windows > 1 else "")
    asked = forecast.asked
    fresh = asked.policy == "incremental" and forecast.before_name == "linear"
    policy = "connected, as nothing is installed" if fresh else asked.policy
    lines = [f"{windows}; policy {policy}; planned in {forecast.seconds:.3f} s"]
    if asked.sigma and forecast.windows > 1:
        lines.append(
            f"sigma {asked.sigma:g}: of a rank its mean load counts and so many standard deviations"
        )
    if asked.objective != "tokens":
        lines.append("figures are of experts that have any rows in a window, not of rows")
    if asked.capacities is not None:
        least, most = min(asked.capacities), max(asked.capacities)
        lines.append(f"capacities {least:g} to {most:g}: figures are for what a rank can take")
    return "\n".join(lines)


def _row(forecast: Forecast, name: str, values: Reals) -> str:
    worst = int(np.nan_to_num(values, nan=-1.0).argmax())
    layer = str(forecast.layout.layers[worst])
    return _aligned((name, figure(mean_known(values)), figure(float(values[worst])), layer))


def _aligned(texts: tuple[str, ...]) -> str:
    first = f"{texts[0]:<{WIDTHS[0]}}"
    rest = zip(texts[1:], WIDTHS[1:], strict=True)
    return (first + "".join(f"{text:>{width}}" for text, width in rest)).rstrip()


def _moves(forecast: Forecast) -> str:
    total = forecast.layout.placement.size
    size = forecast.asked.expert_bytes
    if forecast.before_name == "linear":
        return f"nothing installed: {counted(total, 'slot')} to fill{_weight(size, total)}"
    busy = int((forecast.layer_moves > 0).sum())
    share = forecast.moves / total
    return (
        f"copies to move: {forecast.moves:,} = {share:.2%} of {total:,} slots, in {busy} of "
        f"{len(forecast.layer_moves)} layers{_weight(size, forecast.moves)}"
    )


def _weight(size: int | None, copies: int) -> str:
    return "" if size is None else f"\n{volume(size * copies)} of weights"


def volume(size: float) -> str:
    """Bytes in the largest binary unit that leaves a whole number of them."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"


def counted(number: int, what: str) -> str:
    """So many of something, with thousands marked."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def figure(value: float, shape: str = ".4f") -> str:
    """A number, or a dash where there is none."""
    return "-" if isnan(value) else format(value, shape)
