"""The page of `equipoise replay`: the decision, the table, pictures, what it rests on."""

from collections.abc import Iterator, Mapping, Sequence

from equipoise.report.page import flat_facts, render_page
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

MAX_ROWS = 12
"""Of the table; of more, those that the pictures compare are shown, and all are folded in."""
ARROW = " \u2192 "


def render_html(replay: Replay, about: Mapping[str, str]) -> str:
    """The whole file as text; `about` names command and trace. Raises PlotsMissing."""
    decision, outcomes = decide(replay), tuple(replay.outcomes)
    shown = outcomes if len(outcomes) <= MAX_ROWS else tuple(compared(replay, decision))
    folded = () if shown == outcomes else outcomes
    more = {name: value for name, value in about.items() if name != "command"}
    return render_page(
        "replay.html",
        command=about.get("command", ""),
        title="What balancing would gain",
        subtitle=title(replay),
        verdict=headline(replay, decision),
        gains=decision.best is not None,
        tiles=list(_tiles(replay, decision)),
        heads=HEADS,
        rows=[cells(replay, one) for one in shown],
        bold=_place(shown, decision.best),
        all_rows=[cells(replay, one) for one in folded],
        all_bold=_place(folded, decision.best),
        refusals=[(f"{one.name} in {one.slots:,} slots", one.reason) for one in replay.refusals],
        advice=list(engine_advice(replay, decision)),
        pictures=pictures(replay, decision),
        basis=list(basis(replay)),
        about=flat_facts(more),
    )


def _place(outcomes: Sequence[Outcome], best: Outcome | None) -> int | None:
    return next((place for place, one in enumerate(outcomes) if one is best), None)


def _tiles(replay: Replay, decision: Decision) -> Iterator[tuple[str, str]]:
    planned = (one for one in replay.outcomes[1:] if one.rebalances)
    shown = decision.best or max(planned, key=replay.gain, default=None)
    if shown is None:
        return
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
