"""Frames of styled text as one SVG that a style sheet animates: no script, and no font of its own.

Frames stand side by side on a strip that is moved on by whole frames. A line that several frames
share is drawn once. Blocks are drawn as shapes, so that no font decides how wide they are, and
texts are told how long they are.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

from equipoise.report.live.frame import UNICODE
from equipoise.report.live.styled_text import Line, Span, Style, width

CELL, ROW = 8, 16
"""Pixels of a cell; both are multiples of eight, so that eighths of one are whole pixels."""
BASELINE = 12
"""Of a row's pixels, those above the letters' feet."""
MARGIN, BAR = 14, 30
"""Pixels around the frames, and of the title bar."""
STYLE = """
text{font:13.3px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
text{fill:#1f2328;white-space:pre}
.b{fill:#fff;stroke:#d0d7de}.d{fill:#59636e}.s{font-weight:bold}
.w{fill:#0969da}.o{fill:#d4620a}.p{fill:#d4620a;opacity:.3}.g{fill:#59636e;opacity:.22}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.b{fill:#0d1117;stroke:#3d444d}.d{fill:#9198a1}
.w{fill:#4493f8}.o{fill:#f0883e}.p{fill:#f0883e}.g{fill:#9198a1}}
"""
"""Blue and orange on light and on dark paper; `p` is waiting, `g` what the chart compares with."""
CLASSES = {Style.PLAIN: "", Style.DIM: "d", Style.BOLD: "s", Style.WORK: "w", Style.WAIT: "o"}


@dataclass(frozen=True)
class TimedFrame:
    """A frame, and the seconds for which it is shown."""

    lines: tuple[Line, ...]
    seconds: float


def animated_svg(
    frames: Sequence[TimedFrame], columns: int, rows: int, *, title: str, still: int
) -> str:
    """One SVG.

    Args:
        frames: at least one.
        columns: of the widest frame.
        rows: of the longest.
        title: in the bar above, and for those who do not see it.
        still: number of the frame that is shown where motion is not wanted.
    """
    wide, high = columns * CELL + 2 * MARGIN, rows * ROW + BAR + MARGIN
    names: dict[str, str] = {}
    strip = []
    for number, frame in enumerate(frames):
        uses = []
        for row, line in enumerate(frame.lines):
            if drawn := "".join(_shapes(line)):
                name = names.setdefault(drawn, f"l{len(names)}")
                uses.append(f'<use href="#{name}" y="{row * ROW + BASELINE}"/>')
        strip.append(f'<g transform="translate({number * wide})">{"".join(uses)}</g>')
    defs = "".join(f'<g id="{name}">{drawn}</g>' for drawn, name in names.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'role="img" aria-label="{escape(title)}"><style>{STYLE}{_motion(frames, wide, still)}'
        f"</style><defs>{defs}</defs>"
        f'<rect class="b" x=".5" y=".5" width="{wide - 1}" height="{high - 1}" rx="8"/>'
        f'<text class="d" x="{MARGIN}" y="20">{escape(title)}</text>'
        f'<svg x="{MARGIN}" y="{BAR}" width="{columns * CELL}" height="{rows * ROW}">'
        f'<g class="f">{"".join(strip)}</g></svg></svg>\n'
    )


def _motion(frames: Sequence[TimedFrame], wide: int, still: int) -> str:
    """Key frames by the part of the time that has passed; each holds until the next."""
    total = sum(frame.seconds for frame in frames)
    keys, passed = [], 0.0
    for number, frame in enumerate(frames):
        keys.append(f"{100 * passed / total:.2f}%{{transform:translate({-number * wide}px)}}")
        passed += frame.seconds
    return (
        f".f{{animation:f {total:.1f}s steps(1,end) infinite}}@keyframes f{{{''.join(keys)}}}"
        f"@media (prefers-reduced-motion:reduce){{.f{{animation:none;"
        f"transform:translate({-still * wide}px)}}}}"
    )


def _shapes(line: Line) -> Iterator[str]:
    """The line as shapes and texts, from its baseline."""
    column, short = 0, 0
    has_ghost = any(UNICODE.ghost in span.text for span in line if span.style is Style.DIM)
    for span in line:
        for kind, text in _pieces(span):
            x = column * CELL
            column += width(text)
            if kind == "p":  # waiting begins where work ends, within a cell
                begin, long = x - short, len(text) * CELL + short
                yield f'<path class="p" d="M{begin} {2 - BASELINE}h{long}v{ROW - 4}h-{long}z"/>'
                short = 0
            elif kind:
                if has_ghost and kind == "o" and (behind := _path("g", _ghosts(text), x)):
                    yield f'<path class="g" d="{behind}"/>'
                yield f'<path class="{kind}" d="{_path(kind, text, x)}"/>'
                short = CELL - UNICODE.eighths.find(text[-1]) if kind == "w" else 0
            elif text.strip():
                yield _text(text, x, CLASSES[span.style])


BLOCKS = set(UNICODE.eighths + UNICODE.heights) - {" "}


def _pieces(span: Span) -> Iterator[tuple[str, str]]:
    """Runs of one kind: the class of a shape, or nothing and words without a wide gap."""

    def kind(letter: str) -> str:
        if letter == UNICODE.wait:
            return "p"
        if letter == UNICODE.ghost and span.style is Style.DIM:
            return "g"
        return CLASSES[span.style] if letter in BLOCKS else ""

    for name, run in groupby(span.text, kind):
        text = "".join(run)
        if name:
            yield name, text
        else:
            for part in re.split(r"(  +)", text):
                if part:
                    yield "", part


def _ghosts(text: str) -> str:
    """What the chart compares with, behind the cells that it fills only in part."""
    full = UNICODE.heights[-1]
    return "".join(" " if letter == full else UNICODE.ghost for letter in text)


def _path(kind: str, text: str, x: int) -> str:
    """Rectangles: bars leave room between ranks, columns of the chart stand on each other."""
    path = []
    for letter, run in groupby(text):
        count = len(list(run))
        long = count * CELL
        in_chart = letter == UNICODE.heights[-1] and kind == "o"
        if letter in UNICODE.heights[1:-1] or in_chart:
            high = UNICODE.heights.index(letter) * ROW // 8
            path.append(f"M{x} {ROW - BASELINE}h{long}v-{high}h-{long}z")
        elif letter == " ":
            pass
        elif letter == UNICODE.ghost:
            path.append(f"M{x} {-BASELINE}h{long}v{ROW}h-{long}z")
        else:
            drawn = long - CELL + UNICODE.eighths.index(letter) * CELL // 8
            path.append(f"M{x} {2 - BASELINE}h{drawn}v{ROW - 4}h-{drawn}z")
        x += long
    return "".join(path)


def _text(text: str, x: int, name: str) -> str:
    lead = len(text) - len(text.lstrip(" "))
    words = text.strip(" ")
    label = f' class="{name}"' if name else ""
    # A single letter needs no length; for others the font's own width is not relied on.
    cells = width(words)
    length = f' textLength="{cells * CELL}" lengthAdjust="spacingAndGlyphs"' if cells > 1 else ""
    return f'<text{label} x="{x + lead * CELL}"{length}>{escape(words)}</text>'
