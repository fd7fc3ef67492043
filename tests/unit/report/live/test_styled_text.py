"""Width and cutting of styled text."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.report.live.styled_text import (
    ANSI_256,
    Span,
    Style,
    cut,
    cut_front,
    cut_line,
    plain,
    to_ansi,
    visible,
    width,
)

TEXTS = st.text(max_size=40)


@given(text=TEXTS, columns=st.integers(0, 50))
def test_cut_takes_longest_beginning_that_fits(text: str, columns: int) -> None:
    taken = cut(text, columns)
    assert text.startswith(taken)
    assert width(taken) <= columns
    assert taken == text or width(text[: len(taken) + 1]) > columns


@given(text=TEXTS, columns=st.integers(0, 50))
def test_cut_front_takes_longest_end_that_fits(text: str, columns: int) -> None:
    taken = cut_front(text, columns)
    assert text.endswith(taken)
    assert width(taken) <= columns
    assert taken == text or width(text[len(text) - len(taken) - 1 :]) > columns


@given(texts=st.lists(TEXTS, max_size=5), columns=st.integers(0, 80))
def test_cut_line_is_beginning_of_line(texts: list[str], columns: int) -> None:
    line = tuple(Span(text, Style.WORK) for text in texts)
    taken = plain(cut_line(line, columns))
    assert plain(line).startswith(taken)
    assert width(taken) <= columns


@given(text=st.text())
def test_visible_text_drives_no_terminal(text: str) -> None:
    assert visible(text).isprintable()
    assert len(visible(text)) == len(text)


def test_width_counts_wide_and_combining_characters() -> None:
    assert width("中a") == 3
    assert width("e\u0301") == 1


def test_ansi_ends_every_style_that_it_begins() -> None:
    line = (Span("a"), Span("b", Style.WORK), Span("c", Style.DIM))
    assert to_ansi(line, ANSI_256) == "a\033[38;5;33mb\033[0m\033[2mc\033[0m"
    assert to_ansi(line, {}) == "abc"
