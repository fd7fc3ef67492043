"""Pictures in files: they have colours of their own, in light and in dark surroundings."""

import re
from xml.etree import ElementTree

import pytest
from helpers.paths import ROOT

from equipoise.report.svg import TEXT_COLOUR, draw, standalone_svg

IMAGES = sorted((ROOT / "docs" / "images").glob("*.svg"))


def assert_has_dark_colours(svg: str) -> None:
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert re.search(r"@media \(prefers-color-scheme: ?dark\)", svg)


def assert_readable_anywhere(svg: str) -> None:
    """Texts have the ink of the picture, and each ink has its paper."""
    assert_has_dark_colours(svg)
    light, dark = re.findall(r"svg\{background:(#\w+);color:(#\w+)\}", svg)
    assert not {*light} & {*dark}
    assert "currentColor" in svg
    assert TEXT_COLOUR not in svg


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_pictures_of_docs_have_light_and_dark_colours(path: object) -> None:
    assert_has_dark_colours(ROOT.joinpath(str(path)).read_text(encoding="utf-8"))


def test_picture_of_its_own_has_light_and_dark_colours() -> None:
    pytest.importorskip("matplotlib")
    svg = draw("x", 2.0, lambda figure: figure.subplots().set_title("<title>"))  # type: ignore[arg-type]
    assert_readable_anywhere(standalone_svg(svg))
    assert standalone_svg(svg).count("xmlns=") == 1
