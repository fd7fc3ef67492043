"""A conformance run as one HTML file that needs nothing else."""

from collections.abc import Iterable, Mapping
from typing import Any

from equipoise.hal.conformance.clauses import ORDER, TITLES, place
from equipoise.hal.conformance.result import ClauseFinding, Finding, Result, Status
from equipoise.hal.conformance.search import Held, Reported, Undeclared, Violated
from equipoise.report.clauses import SIGNS, headline, programme, said, verdict, violations
from equipoise.report.html import visible
from equipoise.report.page import CSS

OWN = """
.held { color:var(--good); } .violated, .not-judged { color:var(--bad); font-weight:650; }
.unsupported, .absent { color:var(--soft); }
table.left td, table.left th { text-align:left; white-space:normal; vertical-align:top; }
table.grid { width:auto; } table.grid td, table.grid th { text-align:center; padding:3px 9px; }
table.grid td a { color:inherit; text-decoration:none; }
td.num { white-space:nowrap; } .reported { font-weight:650; }
"""


def render_html(result: Result, about: Mapping[str, Any]) -> str:
    """The whole file as text; `about` holds version, command, machine and time."""
    body = "\n".join(
        (
            _head(result),
            _tiles(result),
            *(_violation(finding) for finding in violations(result)),
            _section("The contract at a glance", _grid(result)),
            _section("Clause by clause", _clauses(result)),
            _section("Property by property", _properties(result)),
            _section("Machine and command", _about(about)),
        )
    )
    title = f"Conformance of {visible(result.backend)}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{CSS}{OWN}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(result: Result) -> str:
    mood = "bad" if result.exit_code else "good"
    return (
        f"<header><h1>Conformance of {visible(result.backend)}</h1>"
        f'<p class="soft">{visible(headline(result))}</p>'
        f'<div class="verdict {mood}">{visible(verdict(result))}</div></header>'
    )


def _tiles(result: Result) -> str:
    played = sum(_played(finding) for finding in result.findings)
    tiles = [
        (f"{result.count(Status.HELD)}", "clauses held"),
        (f"{result.count(Status.VIOLATED)}", "violated"),
        (f"{result.count(Status.UNSUPPORTED)}", "declared unsupported"),
        (f"{len({finding.claim for finding in result.findings})}", "properties"),
        (f"{played:,}", "programs played"),
    ]
    inner = "".join(
        f'<div class="tile"><b>{value}</b><span>{words}</span></div>' for value, words in tiles
    )
    return f'<div class="tiles">{inner}</div>'


def _played(finding: Finding) -> int:
    if isinstance(finding.verdict, Held | Violated):
        return finding.verdict.cases
    return 0


def _violation(finding: Finding) -> str:
    assert isinstance(finding.verdict, Violated)
    lines = "\n".join(visible(line) for line in programme(finding.verdict))
    return _section(
        f"Violated: {finding.verdict.clause}",
        f"<p>{visible(finding.verdict.what)}</p>"
        f'<p class="soft">{visible(finding.claim)}, on {visible(finding.executor)}; the smallest '
        f"program found, of {finding.verdict.cases} played:</p><pre>{lines}</pre>",
    )


def _grid(result: Result) -> str:
    known = {found.clause: found for found in result.clauses()}
    most = max(place(clause)[1] for clause in TITLES)
    head = "".join(f"<th>{number}</th>" for number in range(1, most + 1))
    rows = "".join(
        f"<tr><th>{letter}</th>"
        + "".join(_cell(f"{letter}{number}", known) for number in range(1, most + 1))
        + "</tr>"
        for letter in ORDER
    )
    legend = "; ".join(f"{sign} {status}" for status, sign in SIGNS.items())
    return (
        f'<table class="grid"><tr><th></th>{head}</tr>{rows}</table>'
        f'<p class="soft">{legend}; \u00b7 not in this run</p>'
    )


def _cell(clause: str, known: Mapping[str, ClauseFinding]) -> str:
    if clause not in TITLES:
        return "<td></td>"
    title = visible(f"{clause}: {TITLES[clause]}")
    if clause not in known:
        return f'<td class="absent" title="{title}">\u00b7</td>'
    status = known[clause].status
    link = f'<a href="#{clause}">{SIGNS[status]}</a>'
    return f'<td class="{_class(status)}" title="{title}">{link}</td>'


def _clauses(result: Result) -> str:
    rows = "".join(
        f'<tr id="{found.clause}"><td class="num">{found.clause}</td>'
        f'<td class="{_class(found.status)}">{found.status.value}</td>'
        f"<td>{visible(TITLES.get(found.clause, ''))}</td><td>{visible(said(found))}</td></tr>"
        for found in result.clauses()
    )
    return _table(("clause", "status", "what it says", "on what ground"), rows)


def _properties(result: Result) -> str:
    rows = "".join(
        f"<tr><td>{visible(finding.claim)}</td><td>{visible(', '.join(finding.clauses))}</td>"
        f"<td>{visible(finding.executor)}</td>"
        f'<td class="{_class(finding.status)}">{finding.status.value}</td>'
        f'<td class="num">{_ground(finding)}</td>'
        f'<td class="num">{finding.seconds:.2f} s</td></tr>'
        for finding in result.findings
    )
    return _table(("property", "clauses", "executor", "status", "on what ground", "took"), rows)


def _ground(finding: Finding) -> str:
    if isinstance(finding.verdict, Undeclared):
        return visible(finding.verdict.capability)
    if isinstance(finding.verdict, Reported):
        return visible(finding.verdict.figure)
    count = finding.verdict.cases
    return f"{count} cases" if isinstance(finding.verdict, Held) else f"in case {count} at latest"


def _about(about: Mapping[str, Any]) -> str:
    pairs = "".join(f"<dt>{visible(k)}</dt><dd>{visible(v)}</dd>" for k, v in _flat(about))
    return f"<dl>{pairs}</dl>"


def _flat(about: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, value in about.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, str(value)


def _class(status: Status) -> str:
    return status.value.replace(" ", "-")


def _table(columns: Iterable[str], rows: str) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    return f'<table class="left"><tr>{head}</tr>{rows}</table>'


def _section(title: str, inner: str) -> str:
    return f'<section><h2>{visible(title)}</h2><div class="card">{inner}</div></section>'
