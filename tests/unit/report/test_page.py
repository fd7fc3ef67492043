"""What all pages share: escaping, the header, and lists of facts."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from equipoise import __version__
from equipoise.report.page import TEMPLATES, flat_facts, page_environment, render_page


@given(text=st.text())
def test_any_text_becomes_text_without_control_characters(text: str) -> None:
    shown = page_environment().from_string("{{ text }}").render(text=text)
    assert not set(shown) & set("<>\"'")
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown)


@given(text=st.text())
def test_any_text_in_a_script_ends_no_element(text: str) -> None:
    shown = page_environment().from_string("{{ values | tojson }}").render(values=[text])
    assert not set(shown) & set("<>&'")


def test_page_without_a_value_is_refused() -> None:
    with pytest.raises(UndefinedError, match="title"):
        render_page("base.html", command="")


@pytest.mark.parametrize("template", sorted(path.name for path in TEMPLATES.glob("*.html")))
def test_templates_load_nothing_from_elsewhere(template: str) -> None:
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    assert not re.search(r"https?:|@import|src=", text)
    page_environment().get_template(template)


def test_header_names_product_version_date_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    page = render_page("base.html", command="equipoise <x>", title="Title")
    assert f"<b>Equipoise</b> <span>{__version__}</span> <time>1970-01-02 00:00 UTC</time>" in page
    assert "<code>$ equipoise &lt;x&gt;</code>" in page
    assert "<title>Title - Equipoise</title>" in page
    assert "<code>" not in render_page("base.html", command="", title="Title")


@pytest.mark.parametrize(
    ("about", "facts"),
    [
        ({"a": 1, "b": {"c": "x", "d": None}}, [("a", "1"), ("c", "x")]),
        ({"many": ["x", 2], "none": None}, [("many", "x, 2")]),
    ],
)
def test_facts_are_flat_and_known(about: dict[str, object], facts: list[tuple[str, str]]) -> None:
    assert flat_facts(about) == facts
