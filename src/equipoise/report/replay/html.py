"""The page of `equipoise replay`: the decision, the table, pictures, what it rests on."""

from collections.abc import Iterable, Iterator, Mapping

from equipoise import __version__
from equipoise.report.page import (
    CSS,
    card,
    card_section,
    escape_html,
    facts,
    picture_section,
    section,
)
from equipoise.report.replay.decision import Decision, decide
from equipoise.report.replay.plots import compared, pictures
from equipoise.report.replay.replay import Outcome, Replay
from equipoise.report.replay.table import (
    HEADS,
    basis,
    cells,
    engine_advice,
    gained,
    headline,
    title,
)
from equipoise.report.text import pluralize

MORE_CSS = """
.verdict { border-radius:16px; max-width:76ch; }
.tile b i { font-style:normal; font-weight:400; color:var(--soft); }
"""
MAX_ROWS = 12
"""Of the table; of more, those that the pictures compare are shown, and all are folded in."""
ARROW = " \u2192 "


def render_html(replay: Replay, about: Mapping[str, str]) -> str:
    """The whole file as text; `about` names command and trace. Raises PlotsMissing."""
    decision = decide(replay)
    body = "\n".join(
        (
            _head(replay, decision),
            _tiles(replay, decision),
            section("Each balancer on the same steps", _table(replay, decision)),
            *_refusals(replay),
            card_section("What to do with each engine", facts(engine_advice(replay, decision))),
            *(picture_section(picture) for picture in pictures(replay, decision)),
            card_section("What it rests on", facts(basis(replay))),
            card_section("Command", facts({"equipoise": __version__, **about}.items())),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<title>Equipoise: what balancing would gain</title>\n"
        f"<style>{CSS}{MORE_CSS}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(replay: Replay, decision: Decision) -> str:
    mark = "" if decision.best is None else " good"
    return (
        "<header><h1>What balancing would gain</h1>"
        f'<p class="soft">{escape_html(title(replay))}. A model, not a measurement.</p>'
        f'<div class="verdict{mark}">{escape_html(headline(replay, decision))}</div></header>'
    )


def _tiles(replay: Replay, decision: Decision) -> str:
    planned = (one for one in replay.outcomes[1:] if one.rebalances)
    shown = decision.best or max(planned, key=replay.gain, default=None)
    if shown is None:
        return ""
    inner = "".join(
        f'<div class="tile"><b>{_big(value)}</b><span>{escape_html(words)}</span></div>'
        for value, words in _tile_texts(replay, shown)
    )
    return f'<div class="tiles">{inner}</div>'


def _big(value: str) -> str:
    return f"<i>{ARROW}</i>".join(escape_html(part) for part in value.split(ARROW))


def _tile_texts(replay: Replay, shown: Outcome) -> Iterator[tuple[str, str]]:
    now = replay.now
    what = gained(replay, shown)
    yield f"{replay.gain(shown):+.1%}", f"{what}: {shown.name} in {shown.slots:,} slots"
    imbalance = f"{now.mean_imbalance:.3f}{ARROW}{shown.mean_imbalance:.3f}"
    yield imbalance, "imbalance, without a balancer and with it"
    if replay.times_in_seconds:
        what = "a step" if replay.steps_in_seconds else "the experts of a step"
        times = f"{now.mean_seconds * 1e3:.2f}{ARROW}{shown.mean_seconds * 1e3:.2f}"
        yield times, f"ms, {what} without pauses"
    else:
        yield f"{shown.mean_seconds / now.mean_seconds - 1:+.1%}", "time of a step without pauses"
    if now.kv_tokens is not None and shown.kv_tokens is not None:
        tokens = f"{_thousands(now.kv_tokens)}{ARROW}{_thousands(shown.kv_tokens)}"
        yield tokens, "tokens of KV cache on a rank"


def _thousands(number: int) -> str:
    """Short enough for a tile."""
    return f"{number:,}" if number < 10_000 else f"{number / 1e3:,.0f}k"


def _table(replay: Replay, decision: Decision) -> str:
    note = (
        '<p class="soft">Imbalance is max / mean \u2212 1 of the rows of the ranks, mean over '
        "layers and steps; p95 is what one step in twenty exceeds. Step is the mean time of a "
        "step, gain the throughput against no balancer.</p>"
    )
    everything = _rows(replay, decision, replay.outcomes)
    if len(replay.outcomes) <= MAX_ROWS:
        return note + card(everything)
    number = pluralize(len(replay.outcomes), "row")
    more = f"<details><summary>All, {number}</summary>{everything}</details>"
    return note + card(_rows(replay, decision, compared(replay, decision))) + card(more)


def _rows(replay: Replay, decision: Decision, outcomes: Iterable[Outcome]) -> str:
    head = "".join(f"<th>{escape_html(name)}</th>" for name in HEADS)
    rows = "".join(_row(cells(replay, one), one is decision.best) for one in outcomes)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(texts: Iterable[str], is_best: bool) -> str:
    line = "".join(f"<td>{escape_html(text)}</td>" for text in texts)
    mark = ' class="main"' if is_best else ""
    return f"<tr{mark}>{line}</tr>"


def _refusals(replay: Replay) -> list[str]:
    if not replay.refusals:
        return []
    reasons = ((f"{one.name} in {one.slots:,} slots", one.reason) for one in replay.refusals)
    return [card_section("Not replayed", facts(reasons))]
