"""Draws the frame of a live display: a pure function of its state and the size of the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from equipoise.balancer.experts.runtime.events import COMMITTED, UNCHANGED
from equipoise.demo.live_feed import HOST
from equipoise.demo.settings import REFERENCE_NAME, VariantName
from equipoise.report.live.state import LiveState, Move, PassFigures
from equipoise.report.live.styled_text import (
    Line,
    Span,
    Style,
    cut,
    cut_front,
    cut_line,
    visible,
    width,
)
from equipoise.report.text import pluralize

EVEN = 0.05
"""Imbalance below which ranks are called even: chance makes about as much of these batches."""
MAX_CHART_ROWS = 8
MIN_CHART_ROWS = 4
MIN_MOVE_ROWS, MAX_MOVE_ROWS = 2, 8
SWITCH_SHOWN = 8
"""Steps for which the switch of the text stands out."""
SMALL_LAG = 1.0
"""Seconds behind the serving that need no mention."""


@dataclass(frozen=True)
class Glyphs:
    """Characters that a terminal can show.

    Attributes:
        eighths: a cell that is filled from the left by 0 to 8 eighths.
        heights: a cell that is filled from below by 0 to 8 eighths.
        wait: a cell of waiting.
        ghost: a cell of the pass to compare with.
    """

    eighths: str
    heights: str
    wait: str
    ghost: str
    arrow: str
    bar: str
    commit: str
    dots: str


UNICODE = Glyphs(" ▏▎▍▌▋▊▉█", " ▁▂▃▄▅▆▇█", "░", "·", "→", "│", "▲", "…")
ASCII = Glyphs("    #####", "    #####", ".", "'", "->", "|", "^", "...")


@dataclass
class Section:
    """Lines that are left out together where the terminal is short, the highest `rank` first."""

    rank: int
    lines: list[Line]


def render_frame(
    state: LiveState, columns: int, rows: int, glyphs: Glyphs = UNICODE
) -> tuple[Line, ...]:
    """The frame; at most `rows` lines, none wider than `columns` cells."""
    columns, rows = max(columns, 1), max(rows, 1)
    if not state.name:
        sections = [Section(0, [_line("ranks start: they import torch and load the model")])]
    elif state.name == REFERENCE_NAME:
        sections = _reference(state, columns, glyphs)
    else:
        sections = _serving(state, columns, rows, glyphs)
    sections.insert(0, Section(9, [_title(state)]))
    sections.append(Section(1 if state.log_line else 8, _notes(state, glyphs)))
    while sum(len(section.lines) for section in sections) > rows and len(sections) > 1:
        sections.remove(max(sections, key=lambda section: section.rank))
    lines = [line for section in sections for line in section.lines]
    return tuple(cut_line(line, columns) for line in lines[:rows])


def _line(text: str, style: Style = Style.PLAIN) -> Line:
    return (Span(" " + text, style),)


def _title(state: LiveState) -> Line:
    setup = state.setup
    where = f" (first of {setup.stages} stages)" if setup.stages > 1 else ""
    return (
        Span(" equipoise", Style.BOLD),
        Span(
            f"  {setup.ranks} ranks{where} share the {setup.experts} experts of each layer "
            f"of a language model",
            Style.DIM,
        ),
    )


def _serving(state: LiveState, columns: int, rows: int, glyphs: Glyphs) -> list[Section]:
    """Everything while a pass is served; the chart and the moves take what is left of the rows."""
    bars = _bars(state, columns, max(1, rows // 3), glyphs)
    fixed = 14 + len(bars)  # lines of the other sections, with two blank ones
    chart_rows = min(max(rows - fixed - MIN_MOVE_ROWS, MIN_CHART_ROWS), MAX_CHART_ROWS)
    move_rows = min(max(rows - fixed - chart_rows, MIN_MOVE_ROWS), MAX_MOVE_ROWS)
    return [
        Section(1, [_pass_line(state)]),
        Section(6, _text_lines(state, columns, glyphs)),
        Section(10, [()]),
        Section(7, [_legend(glyphs)]),
        Section(0, bars),
        Section(2, [_insight(state)]),
        Section(11, [()]),
        Section(5, _chart(state, columns, chart_rows, glyphs)),
        Section(12, [()]),
        Section(3, [_rebalance_line(state), _commit_line(state, glyphs)]),
        Section(8, _move_lines(state, columns, move_rows, glyphs)),
        Section(4, [_speed(state)]),
    ]


WORDS = {
    VariantName.UNBALANCED: "nothing is balanced: experts stay where they are",
    VariantName.PLACEMENT: "the given placement: nothing moves",
}


def _pass_line(state: LiveState) -> Line:
    setup = state.setup
    number = setup.passes.index(state.name) + 1 if state.name in setup.passes else 1
    words = WORDS.get(
        VariantName(state.name), f"Equipoise moves experts while serving ({state.name} shares)"
    )
    step, steps = min(state.step + 1, setup.steps), str(setup.steps)
    return (
        Span(f" pass {number}/{len(setup.passes)} step {step:>{len(steps)}}/{steps}  ", Style.DIM),
        Span(words, Style.BOLD),
    )


def _text_lines(state: LiveState, columns: int, glyphs: Glyphs) -> list[Line]:
    """The kind of text, and what the model writes."""
    setup = state.setup
    # A load is gathered while the next step is served, whose text the request may have already.
    phase = setup.phase(max(state.step, state.current.steps_done - 1))
    kind = visible(setup.phases[phase])
    since, tint = "", Style.DIM
    if phase:
        switch = setup.switch_steps[phase - 1]
        since = f"  the text switched at step {switch}: other experts are busy"
        tint = Style.WAIT if state.step < switch + SWITCH_SHOWN else Style.DIM
    prompt, written = (visible(part) for part in state.text)
    written = cut(written, max(columns - 12, 0))
    prompt = cut_front(prompt, max(columns - 12 - max(width(written), 20), 0))
    return [
        (Span(" text       ", Style.DIM), Span(kind, Style.BOLD), Span(since, tint)),
        (
            Span(" the model  ", Style.DIM),
            Span(prompt, Style.DIM),
            Span(written, Style.BOLD),
        ),
    ]


def _legend(glyphs: Glyphs) -> Line:
    return (
        Span(" one step, rank by rank:  ", Style.DIM),
        Span(glyphs.eighths[-1], Style.WORK),
        Span(" computes  ", Style.DIM),
        Span(glyphs.wait, Style.WAIT),
        Span(" waits for the slowest", Style.DIM),
    )


def _bars(state: LiveState, columns: int, most: int, glyphs: Glyphs) -> list[Line]:
    """A bar per rank; of too many ranks the fullest, and how many are left out."""
    ranks = range(state.setup.ranks)
    if state.load is None:
        return [_line(f"rank {rank}") for rank in ranks[:most]]
    computed, length = state.load.computed, state.load.length
    shown: Sequence[int] = ranks
    if len(ranks) > most:
        fullest = sorted(ranks, key=lambda rank: -computed[rank])[: max(most - 1, 1)]
        shown = sorted(fullest)
    label = len(f" rank {len(ranks) - 1} ")
    room = max(columns - label - 22, 0)
    lines = [
        _bar(f" rank {rank} ".ljust(label), computed[rank], length, room / state.longest, glyphs)
        for rank in shown
    ]
    if left_out := len(ranks) - len(shown):
        lines.append(_line(f"and {left_out} ranks with less", Style.DIM))
    return lines[:most]


def _bar(label: str, work: float, length: float, scale: float, glyphs: Glyphs) -> Line:
    """Solid for work, dotted up to the length of the step, and both in figures."""
    eighths, end = round(work * scale * 8), round(length * scale)
    bar = glyphs.eighths[-1] * (eighths // 8)
    if eighths % 8:
        bar += glyphs.eighths[eighths % 8]
    waits = max(0.0, 1 - work / length)
    return (
        Span(label),
        Span(bar.rstrip(), Style.WORK),
        Span(glyphs.wait * (end - len(bar.rstrip())), Style.WAIT),
        Span(f" {work:.2f}x", Style.PLAIN),
        Span(f" waits {waits:.0%}" if waits >= 0.005 else "", Style.WAIT),
    )


def _insight(state: LiveState) -> Line:
    """The picture in words."""
    if state.load is None:
        return _line("no step is sampled yet", Style.DIM)
    layer, rank, ratio = state.load.fullest
    if state.load.imbalance < EVEN:
        return _line("all ranks compute the same: nobody waits", Style.BOLD)
    words = f"rank {rank} computes {ratio:.1f}x the average of layer {layer}: all others wait"
    return _line(words, Style.BOLD)


def _chart(state: LiveState, columns: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """Imbalance by step, with the text below it and, of a pass that balances, commits."""
    setup, room = state.setup, max(columns - 8, 1)
    per_column = max(setup.steps / room, 0.001)
    baseline = state.baseline
    seen = (state.current, baseline or PassFigures())
    top = max([0.2, *(value for figures in seen for value in figures.imbalance.values())])
    now = _levels(state.current, state.step, setup.steps, room)
    ghost = _levels(baseline, setup.steps, setup.steps, room) if baseline else [None] * room
    imbalance = "" if state.load is None else f" {state.load.imbalance:.2f}"
    lines: list[Line] = [
        (
            Span(" imbalance", Style.DIM),
            Span(imbalance, Style.BOLD),
            Span(": extra work of the slowest rank", Style.DIM),
        )
    ]
    if baseline:
        lines[0] += (Span(f"   {glyphs.ghost * 3} without balancing", Style.DIM),)
    for row in range(rows - 1, -1, -1):
        label = f"{top:6.2f} " if row == rows - 1 else f"{0:6.2f} " if row == 0 else " " * 7
        lines.append((Span(label, Style.DIM), *_chart_row(now, ghost, row, top / rows, glyphs)))
    axis = [" "] * room
    for switch, name in zip((0, *setup.switch_steps), setup.phases, strict=True):
        _write(axis, int(switch / per_column), glyphs.bar + visible(name))
    lines.append((Span(" " * 7 + "".join(axis), Style.DIM),))
    marks = [" "] * room
    for number, step in enumerate(state.current.commits):
        where = int(step / per_column)
        _write(marks, where, glyphs.commit + (" weights moved" if number == 0 else ""))
    if state.name != VariantName.UNBALANCED:
        lines.append((Span(" " * 7 + "".join(marks), Style.WORK),))
    return lines


def _write(line: list[str], column: int, text: str) -> None:
    """Put a text into a line of single cells; wide characters take two, of which one is empty."""
    for letter in text:
        if column + cells_of(letter) > len(line):
            return
        line[column] = letter
        if cells_of(letter) == 2:
            line[column + 1] = ""
        column += cells_of(letter)


def cells_of(letter: str) -> int:
    """Columns of a character, at least one."""
    return max(width(letter), 1)


def _levels(figures: PassFigures, until: int, steps: int, room: int) -> list[float | None]:
    """Imbalance by column: the last sample up to its end; None behind step `until`."""
    samples = sorted(figures.imbalance.items())
    levels: list[float | None] = []
    last, index = None, 0
    for column in range(room):
        end = (column + 1) * steps / room
        while index < len(samples) and samples[index][0] < end:
            last, index = samples[index][1], index + 1
        levels.append(last if column * steps / room <= until else None)
    return levels


def _chart_row(
    now: Sequence[float | None],
    ghost: Sequence[float | None],
    row: int,
    height: float,
    glyphs: Glyphs,
) -> Line:
    """One row of the chart, whose cells are `height` of imbalance high."""

    def cell(value: float | None, other: float | None) -> Span:
        eighths = 0 if value is None else round((value / height - row) * 8)
        if (filled := glyphs.heights[max(0, min(eighths, 8))]) != " ":
            return Span(filled, Style.WAIT)
        reached = other is not None and other / height > row
        return Span(glyphs.ghost if reached else " ", Style.DIM)

    row_cells = [cell(value, other) for value, other in zip(now, ghost, strict=True)]
    return tuple(
        Span("".join(span.text for span in group), style)
        for style, group in groupby(row_cells, key=lambda span: span.style)
    )


PHASES = ("planning", "moving", COMMITTED)


def _rebalance_line(state: LiveState) -> Line:
    """Where the last rebalance is."""
    if state.name in WORDS:
        return _line("no rebalance in this pass", Style.DIM)
    rebalance = state.rebalance
    if rebalance is None:
        return _line("load is counted: the first plan is made of it", Style.DIM)
    if rebalance.phase == UNCHANGED:
        words = f"rebalance {rebalance.number}: little to gain, so nothing moves"
        return _line(words, Style.DIM)
    if rebalance.phase not in PHASES:
        return _line(f"rebalance {rebalance.number}: {rebalance.phase}; weights stay as they were")
    spans = [Span(f" rebalance {rebalance.number}:", Style.DIM)]
    texts = {
        "planning": "plan",
        "moving": f"move {rebalance.moves_total or ''} experts".replace("  ", " "),
        COMMITTED: "commit",
    }
    for phase in PHASES:
        reached = phase == rebalance.phase
        spans.append(Span(f"  {'[' if reached else ' '}", Style.DIM))
        spans.append(Span(texts[phase], Style.BOLD if reached else Style.DIM))
        spans.append(Span("]" if reached else " ", Style.DIM))
    return tuple(spans)


def _commit_line(state: LiveState, glyphs: Glyphs) -> Line:
    """What the last commit brought."""
    if (commit := state.commit) is None:
        return ()
    line = (
        Span(f" rebalance {commit.number}", Style.WORK),
        Span(
            f" moved {pluralize(commit.copies, 'expert')} in {commit.seconds:.1f} s while serving",
            Style.WORK,
        ),
    )
    if commit.before is None or commit.after is None:
        return line
    change = f": imbalance {commit.before:.2f} {glyphs.arrow} {commit.after:.2f}"
    return (*line, Span(change, Style.BOLD))


def _move_lines(state: LiveState, columns: int, most: int, glyphs: Glyphs) -> list[Line]:
    """Which expert goes from which rank to which, in columns."""
    rebalance = state.rebalance
    if rebalance is None or not rebalance.moves:
        return [()] * most
    texts = [_move(move, glyphs) for move in rebalance.moves]
    wide = max(map(len, texts)) + 2
    per_line = max((columns - 1) // wide, 1)
    shown = texts[: per_line * most]
    if left_out := rebalance.moves_total - len(shown):
        shown = [*shown[:-1], f"and {left_out + 1} more"]
    lines: list[Line] = [
        _line("".join(text.ljust(wide) for text in shown[first : first + per_line]))
        for first in range(0, len(shown), per_line)
    ]
    return [*lines, *[()] * (most - len(lines))]


def _move(move: Move, glyphs: Glyphs) -> str:
    layer, expert, source, target = move
    origin = "host" if source == HOST else f"rank {source}"
    return f"layer {layer} expert {expert}: {origin} {glyphs.arrow} rank {target}"


def _speed(state: LiveState) -> Line:
    speed = state.current.tokens_per_second
    spans = [
        Span(" tokens/s  ", Style.DIM),
        Span("-" if speed is None else f"{speed:,.0f}", Style.BOLD),
        Span(" in this pass", Style.DIM),
    ]
    before = state.baseline.tokens_per_second if state.baseline else None
    if before is not None:
        spans.append(Span(f"; {before:,.0f} without balancing", Style.DIM))
    setup = state.setup
    if setup.cores and setup.cores < setup.ranks:
        spans.append(Span(f" ({setup.ranks} ranks share {setup.cores} cores)", Style.DIM))
    return tuple(spans)


def _reference(state: LiveState, columns: int, glyphs: Glyphs) -> list[Section]:
    """While one process serves alone: what the passes came to."""
    done, steps = state.current.steps_done, state.setup.steps
    lines: list[Line] = [(), _line("imbalance, mean of all sampled steps", Style.DIM)]
    seen = {name: state.figures.get(name, PassFigures()) for name in state.setup.passes}
    longest = max([0.01, *(figures.mean_imbalance or 0.0 for figures in seen.values())])
    for name, figures in seen.items():
        imbalance, commits = figures.mean_imbalance or 0.0, len(figures.commits)
        bar = round(imbalance / longest * max(columns // 2 - 10, 0))
        moved = f"  weights moved {pluralize(commits, 'time')}" if commits else ""
        lines.append(
            (
                Span(f" {name:<11}", Style.BOLD),
                Span(glyphs.eighths[-1] * bar, Style.WAIT),
                Span(f" {imbalance:.2f}", Style.BOLD),
                Span(moved, Style.WORK),
            )
        )
    words = "check: one process serves the same requests alone; outputs must be identical"
    check = [(), _line(words), _line(f"step {done}/{steps}", Style.DIM)]
    last = replace(state, name=state.setup.passes[-1], load=None)
    chart = [(), *_chart(last, columns, MIN_CHART_ROWS, glyphs)]
    return [Section(1, lines), Section(2, chart), Section(0, check)]


def _notes(state: LiveState, glyphs: Glyphs) -> list[Line]:
    """How far behind, what is missing, what was logged."""
    if state.log_line:
        return [_line(visible(state.log_line), Style.DIM)]
    notes = [f"{pluralize(state.missing, 'event')} not shown"] if state.missing else []
    if state.behind >= SMALL_LAG:
        lag = f"{state.behind:.0f} s behind the serving, which does not wait"
        notes.append(f"paced for the eye: {lag}")
    return [_line("; ".join(notes), Style.DIM)]
