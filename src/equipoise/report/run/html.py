"""The HTML report of a run: one file that needs neither network nor folder."""

import json
from collections.abc import Iterable

from equipoise.demo.run_record import RunRecord
from equipoise.report.page import (
    CSS,
    card,
    escape_html,
    facts,
    json_details,
    picture_section,
    section,
)
from equipoise.report.run.plots import pictures
from equipoise.report.run.summary import RunSummary
from equipoise.report.run.table import COLUMNS, cells, ordered_variants, verdict
from equipoise.report.svg import PlotsMissing
from equipoise.report.text import human_bytes

__all__ = ["PlotsMissing", "render_html"]


def render_html(record: RunRecord, summary: RunSummary, command: str) -> str:
    """The whole file as text. Raises PlotsMissing without matplotlib.

    Every text of the run is escaped: prompts are whatever a file held.
    """
    body = "\n".join(
        (
            _head(summary),
            _tiles(summary),
            section("The same traffic, served in each way", _table(summary)),
            *(picture_section(picture) for picture in pictures(record)),
            section("What the model was asked, and wrote", _samples(record)),
            *_engine(summary),
            section("Machine and command", _machine(summary, command)),
            _figures(summary),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Equipoise: a run on {summary.ranks_text}</title>\n<style>{CSS}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(summary: RunSummary) -> str:
    kinds = " \u2192 ".join(escape_html(phase) for phase in summary.phases)
    mood = "bad" if summary.exit_code else "good"
    return (
        "<header><h1>Equipoise</h1>"
        f'<p class="soft">{summary.ranks_text}, {summary.layers} layers of {summary.experts} '
        f"experts in {summary.slots} slots, {escape_html(summary.sharing_text)}. "
        f"{summary.tokens:,} tokens in {summary.steps} steps: {kinds}.</p>"
        f'<div class="verdict {mood}">{escape_html(verdict(summary))}</div></header>'
    )


def _tiles(summary: RunSummary) -> str:
    compared = summary.has_unbalanced
    noise = f"; noise {_seconds(summary.stall_noise_seconds)}" if compared else ""
    untouched = f"; {_rate(summary.tokens_per_second_unbalanced)} without balancing"
    before = [(_decimal(summary.imbalance_unbalanced), "imbalance without balancing")]
    migration_tiles = [
        (f"{summary.copies:,}", f"copies moved, {human_bytes(summary.bytes_moved)}"),
        (f"{summary.rebalances}", "rebalances committed"),
        (_seconds(summary.stall_seconds), f"stall{noise}"),
    ]
    tiles = [
        *(before if compared else []),
        (_decimal(summary.imbalance_balanced), f"balanced, {summary.sharing_text}"),
        *([(_smaller(summary), "times smaller")] if compared else []),
        (_decimal(summary.noise_floor), "noise floor"),
        *([] if summary.serves_placement else migration_tiles),
        (_rate(summary.tokens_per_second), f"tokens/s{untouched if compared else ''}"),
    ]
    inner = "".join(
        f'<div class="tile"><b>{escape_html(value)}</b><span>{escape_html(words)}</span></div>'
        for value, words in tiles
    )
    return f'<div class="tiles">{inner}</div>'


def _table(summary: RunSummary) -> str:
    header = "".join(f"<th>{escape_html(column)}</th>" for column in COLUMNS)
    lines = []
    for name, _ in ordered_variants(summary):
        texts = (text.removeprefix("* ").strip() for text in cells(summary, name))
        row = "".join(f"<td>{escape_html(text)}</td>" for text in texts)
        lines.append(f'<tr class="{"main" if name == summary.shares else "other"}">{row}</tr>')
    return (
        '<p class="soft">Imbalance is max / mean \u2212 1 of the rows that ranks computed, mean '
        f"over layers and steps {summary.measured_from_step} to {summary.steps - 1}; beside it "
        f"as a multiple of the noise floor{_compared_with(summary)}.</p>"
        f'<div class="card"><table><thead><tr>{header}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _compared_with(summary: RunSummary) -> str:
    """What the columns of the table are compared with, in words."""
    if summary.has_unbalanced:
        return (
            ", and how many times smaller than without balancing. "
            "Stall is time above the median step without balancing"
        )
    return (
        ". The traffic was not served without balancing. "
        "Stall is time above the variant's own median step"
    )


def _samples(record: RunRecord) -> str:
    cards = "".join(
        f'<div class="card"><h3>{escape_html(phase)}</h3>'
        f"<pre>{escape_html(prompt)}<mark>{escape_html(continuation)}</mark></pre></div>"
        for phase, prompt, continuation in zip(
            record.phases, record.prompts, record.continuations, strict=False
        )
    )
    note = '<p class="soft">A small byte-level model; its continuation is in colour.</p>'
    return f'{note}<div class="samples">{cards}</div>' if cards else "<p>No sample was kept.</p>"


def _engine(summary: RunSummary) -> list[str]:
    """Options of the engine; nothing without one."""
    if not summary.engine_options:
        return []
    note = '<p class="soft">By option of the command; staging_bytes is of a rank.</p>'
    facts = (
        (key, human_bytes(int(value)) if key == "staging_bytes" else value)
        for key, value in summary.engine_options.items()
    )
    return [section("Options of the engine", note + _list(facts))]


def _machine(summary: RunSummary, command: str) -> str:
    facts: Iterable[tuple[str, str]] = (
        ("command", command),
        ("equipoise", f"{summary.version}, {summary.backend} over {summary.communicator}"),
        *summary.machine.items(),
        ("outputs", summary.reference_outputs),
        *([("placement", summary.placement)] if summary.serves_placement else []),
    )
    return _list(facts)


def _list(pairs: Iterable[tuple[str, object]]) -> str:
    return card(facts(pairs))


def _figures(summary: RunSummary) -> str:
    text = json.dumps(summary.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    return json_details(text)


def _smaller(summary: RunSummary) -> str:
    before, after = summary.imbalance_unbalanced, summary.imbalance_balanced
    return f"{before / after:.1f}" if before is not None and after else "\u2013"


def _decimal(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.3f}"


def _seconds(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.2f} s"


def _rate(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:,.0f}"
