"""The animated picture: every frame is in it, in its time."""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.report.live.styled_text import Span, Style, visible

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SVG = "{http://www.w3.org/2000/svg}"
LINES = st.lists(
    st.builds(
        Span,
        st.text(st.sampled_from("ab <&中 █▌▁░·"), max_size=12).map(visible),
        st.sampled_from(list(Style)),
    ),
    max_size=4,
).map(tuple)


def imported(name: str) -> Any:
    """A module of `lib`; the folder of benchmarks is no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return import_module(f"lib.{name}")
    finally:
        sys.path.remove(str(BENCHMARKS))


@given(
    frames=st.lists(
        st.tuples(st.lists(LINES, max_size=4).map(tuple), st.floats(0.1, 3)), min_size=1, max_size=5
    )
)
def test_animated_svg_holds_every_frame_for_its_time(frames: list[tuple[Any, float]]) -> None:
    module = imported("animated_svg")
    timed = [module.TimedFrame(lines, seconds) for lines, seconds in frames]
    svg = module.animated_svg(timed, 80, 4, title="a <b>", still=0)
    root = ElementTree.fromstring(svg)
    strip = next(group for group in root.iter(f"{SVG}g") if group.get("class") == "f")
    assert len(strip) == len(frames)
    drawn = {group.get("id"): group for group in root.iter(f"{SVG}g") if group.get("id")}
    assert all(use.get("href", "")[1:] in drawn for use in strip.iter(f"{SVG}use"))
    starts = [float(part) for part in re.findall(r"([\d.]+)%\{", svg)]
    total = sum(seconds for _, seconds in frames)
    passed = 0.0
    for start, (_, seconds) in zip(starts, frames, strict=True):
        assert start == pytest.approx(100 * passed / total, abs=0.01)
        passed += seconds


def test_animated_svg_draws_a_bar_of_its_length_and_waiting_behind_it() -> None:
    module = imported("animated_svg")
    line = (Span("r "), Span("██▌", Style.WORK), Span("░░", Style.WAIT))
    svg = module.animated_svg([module.TimedFrame((line,), 1.0)], 10, 1, title="", still=0)
    work, wait = re.findall(r'<path class="[wp]" d="([^"]*)"/>', svg)
    # Two and a half cells of eight pixels, from the third on; waiting up to the end of the seventh.
    assert re.findall(r"M(\d+) \S+?h(\d+)v", work) == [("16", "16"), ("32", "4")]
    assert re.findall(r"M(\d+) \S+?h(\d+)v", wait) == [("36", "20")]
