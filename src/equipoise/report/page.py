"""HTML pages from jinja2 templates: one base with style and header, one template per page.

jinja2 is imported when a page is rendered, so that no other command pays for it.
"""

import os
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


def render_page(template: str, *, command: str, **values: object) -> str:
    """One self-contained HTML file: the template in the base page.

    Args:
        template: name of a file in `templates/`.
        command: the command line that the page comes from; empty where there was none.
        values: what the template shows. Texts are escaped; an `<svg>` is inserted as it is.
    """
    return (
        page_environment()
        .get_template(template)
        .render(version=__version__, date=_date(), command=command, **values)
    )


@lru_cache(maxsize=1)
def page_environment() -> "Environment":
    """The templates: everything is escaped, and a value that is missing is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def flat_facts(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values, those of mappings within among them; without what has no value."""
    facts: list[tuple[str, str]] = []
    for key, value in about.items():
        if isinstance(value, Mapping):
            facts += flat_facts(value)
        elif isinstance(value, list | tuple):
            facts.append((key, ", ".join(map(str, value))))
        elif value is not None:
            facts.append((key, str(value)))
    return facts


def _printable(value: object) -> object:
    """Control characters, which no page may hold, are replaced before a text is escaped."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in value)


def _date() -> str:
    """Now, or what `SOURCE_DATE_EPOCH` says, which makes a page reproducible."""
    seconds = float(os.environ.get("SOURCE_DATE_EPOCH", "") or time.time())
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
