"""The page of `equipoise report`: one HTML file that needs nothing else."""

from collections.abc import Iterable, Mapping

from equipoise import __version__
from equipoise.report.canvas import Picture
from equipoise.report.comparison import FIGURES, Comparison
from equipoise.report.comparison_heatmaps import heat_maps
from equipoise.report.forecast_table import counted, figure
from equipoise.report.html import visible
from equipoise.report.page import CSS
from equipoise.report.spread import Spread

SHAPES = ",.1f", ",.1f", ".4f"


def render_html(found: Comparison, about: Mapping[str, str]) -> str:
    """The whole file as text; `about` names command and files. Raises PlotsMissing."""
    body = "\n".join(
        (
            _head(found),
            _section("Mean over layers", _averages(found)),
            *(_picture(picture) for picture in heat_maps(found)),
            _section("Layer by layer, ranks", _layers(found)),
            _section("Where from", _about(about)),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Equipoise: rows on {found.ranks} ranks</title>\n<style>{CSS}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(found: Comparison) -> str:
    statistics = found.statistics
    return (
        "<header><h1>Who has how much to do</h1>"
        f'<p class="soft">{counted(len(statistics.layers), "layer")} of '
        f"{counted(statistics.experts, 'expert')} on {counted(found.ranks, 'rank')}, "
        f"{counted(statistics.windows, 'window')}. Imbalance is max / mean \u2212 1; "
        "every figure is the mean over windows, the first table's also over layers.</p></header>"
    )


def _averages(found: Comparison) -> str:
    rows = [
        (f"{served.name}, by {unit}", str(served.slots), *_three(spread.average))
        for unit in ("rank", "slot")
        for served in found.served
        for spread in (served.by_rank if unit == "rank" else served.by_slot,)
    ]
    return _table(("", "slots", *FIGURES), rows)


def _layers(found: Comparison) -> str:
    heads = [f"{served.name}: {name}" for served in found.served for name in FIGURES]
    rows = [
        (str(layer), *(text for served in found.served for text in _of(served.by_rank, place)))
        for place, layer in enumerate(found.statistics.layers)
    ]
    return f"<details><summary>All layers</summary>{_table(('layer', *heads), rows)}</details>"


def _of(spread: Spread, place: int) -> tuple[str, ...]:
    return _three((spread.mean[place], spread.std[place], spread.imbalance[place]))


def _three(values: Iterable[float]) -> tuple[str, ...]:
    return tuple(figure(float(v), shape) for v, shape in zip(values, SHAPES, strict=True))


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{visible(name)}</th>" for name in heads)
    lines = ("".join(f"<td>{visible(text)}</td>" for text in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _picture(picture: Picture) -> str:
    inner = f'<p class="soft">{visible(picture.caption)}</p>{picture.svg}'
    return _section(picture.title, inner)


def _about(about: Mapping[str, str]) -> str:
    facts = {"equipoise": __version__, **about}
    pairs = (f"<dt>{visible(k)}</dt><dd>{visible(v)}</dd>" for k, v in facts.items())
    return f"<dl>{''.join(pairs)}</dl>"


def _section(title: str, inner: str) -> str:
    return f'<section><h2>{visible(title)}</h2><div class="card">{inner}</div></section>'
