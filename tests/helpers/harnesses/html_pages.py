"""A page as a browser sees it, and a page whose every text is hostile."""

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from unittest.mock import patch

from equipoise.report.page import render_page
from equipoise.report.svg import Picture

HOSTILE = (
    "\"'><script>alert(1)</script><img src=x onerror=alert(1)></pre></style></svg>"
    "<!-- {{ 7 * 7 }} {% raw %} & \x00\x1b]0;x\x07\ud83d"
)
EMPTY = {"meta", "link", "br", "hr", "img", "input"}


class Outline(HTMLParser):
    """Checks that every element is closed, and keeps what matters."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)
        self.loads += [value or "" for name, value in attrs if name.endswith(("src", "href"))]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.remove(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(page: str) -> Outline:
    """The outline of a page in which every element is closed."""
    parsed = Outline()
    parsed.feed(page)
    parsed.close()
    assert parsed.open == []
    return parsed


def hostile_page(module: str, render: Callable[[], str]) -> tuple[str, str]:
    """The page that `render` makes, and the same with `HOSTILE` for every text in it.

    `module` is the one whose `render_page` is called. Pictures keep their `<svg>`, which is drawn
    and escaped elsewhere.
    """
    calls: list[tuple[str, dict[str, object]]] = []

    def note(template: str, **values: object) -> str:
        calls.append((template, values))
        return render_page(template, **values)  # type: ignore[arg-type]

    with patch(f"{module}.render_page", note):
        page = render()
    [(template, values)] = calls
    texts = {name: _hostile(value) for name, value in values.items()}
    return page, render_page(template, **texts)  # type: ignore[arg-type]


def assert_every_text_is_escaped(module: str, render: Callable[[], str]) -> None:
    """Hostile texts add no element and no attribute to the page, and reach it as text."""
    plain, hostile = hostile_page(module, render)
    first, second = outline(plain), outline(hostile)
    assert second.tags == first.tags
    assert second.attributes <= first.attributes | {"class"}
    assert "<script>alert" not in hostile
    assert not set("\x00\x1b\x07\ud83d") & set(hostile)
    assert "{{ 7 * 7 }}" in second.text
    assert "<img src=x onerror=alert(1)>" in second.text


def _hostile(value: object) -> object:
    match value:
        case str():
            return HOSTILE
        case Picture():
            return replace(value, title=HOSTILE, caption=HOSTILE)
        case dict():
            return {key: _hostile(one) for key, one in value.items()}
        case list() | tuple():
            return type(value)(_hostile(one) for one in value)
    return value
