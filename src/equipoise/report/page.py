"""Parts that all HTML reports share: style sheet, escaping, sections, tables, lists of facts.

Every function returns HTML; texts are escaped here, `inner` and SVG are HTML already.
"""

from collections.abc import Iterable
from html import escape

from equipoise.report.svg import Picture

CSS = """
:root { color-scheme: light dark; --paper:#fbfaf7; --card:#ffffff; --ink:#1b2a41; --soft:#667085;
  --line:#e5e2da; --good:#1f7a4d; --bad:#b3331d; --accent:#2456a4;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  --mono: ui-monospace, "Cascadia Mono", Menlo, Consolas, "Noto Sans Mono", monospace; }
@media (prefers-color-scheme: dark) { :root { --paper:#11151c; --card:#191f29; --ink:#e4e7ec;
  --soft:#98a2b3; --line:#2b3340; --good:#5fc48f; --bad:#f0876f; --accent:#82aedb; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:16px/1.55 var(--font); }
main { max-width:1080px; margin:0 auto; padding:48px 24px 72px; }
h1 { font-size:30px; line-height:1.2; margin:0 0 6px; letter-spacing:-.01em; }
h2 { font-size:20px; margin:52px 0 4px; letter-spacing:-.005em; }
p { margin:0 0 12px; max-width:72ch; }
.soft { color:var(--soft); }
.verdict { display:inline-block; margin:18px 0 0; padding:6px 14px; border-radius:999px;
  font-weight:600; border:1.5px solid currentColor; overflow-wrap:anywhere; }
.good { color:var(--good); } .bad { color:var(--bad); }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(220px,1fr)); gap:14px;
  margin:28px 0 0; }
.tile { background:var(--card); border:1px solid var(--line); border-radius:12px;
  padding:16px 18px; }
.tile b { display:block; font-size:26px; line-height:1.2; font-weight:650;
  font-variant-numeric:tabular-nums; letter-spacing:-.01em; }
.tile span { display:block; font-size:13px; color:var(--soft); }
.card { background:var(--card); border:1px solid var(--line); border-radius:12px; padding:18px;
  margin:14px 0 0; overflow-x:auto; }
.card svg { display:block; width:100%; height:auto; min-width:640px; }
.card svg text { font-family:var(--font) !important; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; }
th, td { text-align:right; padding:8px 12px; border-bottom:1px solid var(--line);
  white-space:nowrap; }
th { font-size:13px; font-weight:500; color:var(--soft); }
th:first-child, td:first-child { text-align:left; }
tr:last-child td { border-bottom:0; }
tr.main td { font-weight:650; }
.samples { display:grid; grid-template-columns:repeat(auto-fit,minmax(290px,1fr)); gap:14px; }
pre { font:13px/1.5 var(--mono); margin:0; white-space:pre-wrap; overflow-wrap:anywhere; }
.samples h3 { font-size:14px; margin:0 0 8px; color:var(--soft); font-weight:600; }
mark { background:none; color:var(--accent); font-weight:650; }
dl { display:grid; grid-template-columns:max-content 1fr; gap:4px 20px; margin:0; }
dt { color:var(--soft); } dd { margin:0; overflow-wrap:anywhere; }
summary { cursor:pointer; color:var(--soft); }
details pre { margin-top:12px; max-height:480px; overflow:auto; }
"""
"""One column, both colour schemes, no fonts to load."""


def escape_html(text: str) -> str:
    """Escaped for HTML; control characters, which no page may hold, are replaced."""
    printable = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    return escape(printable, quote=True)


def section(title: str, inner: str) -> str:
    """A section with its heading."""
    return f"<section><h2>{escape_html(title)}</h2>{inner}</section>"


def card(inner: str) -> str:
    """A box of its own."""
    return f'<div class="card">{inner}</div>'


def card_section(title: str, inner: str) -> str:
    """A section in a box, with its heading above."""
    return section(title, card(inner))


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of texts."""
    head = "".join(f"<th>{escape_html(name)}</th>" for name in heads)
    lines = ("".join(f"<td>{escape_html(text)}</td>" for text in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """A list of names and values."""
    items = "".join(f"<dt>{escape_html(k)}</dt><dd>{escape_html(str(v))}</dd>" for k, v in pairs)
    return f"<dl>{items}</dl>"


def picture_section(picture: Picture) -> str:
    """A picture below its caption; texts in the SVG were escaped when it was drawn."""
    caption = f'<p class="soft">{escape_html(picture.caption)}</p>'
    return section(picture.title, caption + card(picture.svg))


def json_details(text: str) -> str:
    """All figures of a report, folded in."""
    inner = f"<summary>All figures as JSON</summary><pre>{escape_html(text)}</pre>"
    return card(f"<details>{inner}</details>")
