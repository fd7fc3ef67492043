"""What a conformance run ends with on a terminal: a line a clause, violations, a matrix.

A conformance run as one HTML file that needs nothing else.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from equipoise.hal.conformance.clauses import FAMILIES, ORDER, TITLES, place
from equipoise.hal.conformance.result import ClauseFinding, Finding, Result, Status
from equipoise.hal.conformance.search import Held, Reported, Undeclared, Violated
from equipoise.report.run.html import visible
from equipoise.report.stylesheet import CSS
from equipoise.report.terminal import Ink, Tint, paint

WIDTH = 80
NAME, STATUS = 5, 13
SIGNS = {
    Status.HELD: "●",
    Status.VIOLATED: "✗",
    Status.UNSUPPORTED: "○",
    Status.NOT_JUDGED: "?",
    Status.REPORTED: "≈",
}
"""What stands for a status in the matrix; a dot for a clause that no property judges."""
ABSENT = "·"
TINTS = {
    Status.HELD: Tint.GREEN,
    Status.VIOLATED: Tint.RED,
    Status.UNSUPPORTED: Tint.DIM,
    Status.NOT_JUDGED: Tint.RED,
    Status.REPORTED: Tint.BOLD,
}


def render(result: Result, ink: Ink) -> str:
    """The whole text; its last line is `verdict(result)`. No line is wider than `WIDTH`, save
    where the name of a property or a step is longer."""
    lines = [
        paint(headline(result), Tint.BOLD, ink),
        "",
        *(_clause(found, ink) for found in result.clauses()),
        *_violations(result, ink),
        "",
        *matrix(result, ink),
        "",
        paint(verdict(result), Tint.RED if result.exit_code else Tint.GREEN, ink),
    ]
    return "\n".join(lines)


def headline(result: Result) -> str:
    """What was tested, and how."""
    return (
        f"conformance of {result.backend} with {result.communicator}, up to "
        f"{result.ranks} rank{'s' * (result.ranks != 1)}, profile {result.profile}, "
        f"seed {result.seed}"
    )


def verdict(result: Result) -> str:
    """The last line: counts, and how long it took."""
    counts = {status: result.count(status) for status in Status}
    told = [f"{count} {status}" for status, count in counts.items() if count]
    return f"{_kept(result)}: {', '.join(told)}; {result.seconds:.0f} s"


def _kept(result: Result) -> str:
    if result.exit_code:
        return "THE CONTRACT IS BROKEN"
    whole = {finding.family for finding in result.findings} == set(FAMILIES)
    return "the contract is kept" if whole else "this part of the contract is kept"


def said(found: ClauseFinding) -> str:
    """A clause's finding in words."""
    if found.status is Status.UNSUPPORTED:
        return f"not declared: {found.lacking}"
    if found.status is Status.HELD:
        return f"{found.cases} cases"
    if found.status is Status.REPORTED:
        return found.figures
    names = sorted({f.claim for f in found.findings if f.status is Status.VIOLATED})
    return f"see {', '.join(names)}"


def matrix(result: Result, ink: Ink) -> list[str]:
    """Family letters down, clause numbers across, a sign for each status."""
    known = {found.clause: found.status for found in result.clauses()}
    most = max(place(clause)[1] for clause in TITLES)
    head = paint("   " + "".join(f"{number:>3}" for number in range(1, most + 1)), Tint.DIM, ink)
    rows = [f"{letter:<3}" + "".join(_cells(letter, most, known, ink)).rstrip() for letter in ORDER]
    legend = "   ".join(f"{sign} {status}" for status, sign in SIGNS.items())
    return [head, *rows, paint(f"{legend}   {ABSENT} not in this run", Tint.DIM, ink)]


def violations(result: Result) -> list[Finding]:
    """The properties that do not hold."""
    return [finding for finding in result.findings if isinstance(finding.verdict, Violated)]


def programme(verdict: Violated) -> list[str]:
    """The shrunk program, numbered as its steps are, with its schedule."""
    head = [f"schedule {verdict.case.schedule.hex(' ')}"] if verdict.case.schedule else []
    return verdict.case.program.lines() + head


def _clause(found: ClauseFinding, ink: Ink) -> str:
    status = paint(f"{found.status.value:<{STATUS}}", TINTS[found.status], ink)
    line = f"{found.clause:<{NAME}}{status}{TITLES.get(found.clause, '')}"
    if found.status is Status.HELD:
        return line
    margin = " " * (NAME + STATUS)
    told = textwrap.fill(said(found), WIDTH, initial_indent=margin, subsequent_indent=margin)
    return f"{line}\n{paint(told, Tint.DIM, ink)}"


def _violations(result: Result, ink: Ink) -> Iterable[str]:
    for finding in violations(result):
        assert isinstance(finding.verdict, Violated)
        yield ""
        title = f"{finding.claim} ({finding.executor})"
        yield paint(title, Tint.RED, ink)
        yield from textwrap.wrap(finding.verdict.what, WIDTH, subsequent_indent="  ")
        yield f"smallest program found, of {finding.verdict.cases} played:"
        yield from (f"    {line}" for line in programme(finding.verdict))


def _cells(letter: str, most: int, known: dict[str, Status], ink: Ink) -> Sequence[str]:
    return [_terminal_cell(f"{letter}{number}", known, ink) for number in range(1, most + 1)]


def _terminal_cell(clause: str, known: dict[str, Status], ink: Ink) -> str:
    if clause not in TITLES:
        return "   "
    status = known.get(clause)
    if status is None:
        return "  " + paint(ABSENT, Tint.DIM, ink)
    return "  " + paint(SIGNS[status], TINTS[status], ink)


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
        + "".join(_html_cell(f"{letter}{number}", known) for number in range(1, most + 1))
        + "</tr>"
        for letter in ORDER
    )
    legend = "; ".join(f"{sign} {status}" for status, sign in SIGNS.items())
    return (
        f'<table class="grid"><tr><th></th>{head}</tr>{rows}</table>'
        f'<p class="soft">{legend}; \u00b7 not in this run</p>'
    )


def _html_cell(clause: str, known: Mapping[str, ClauseFinding]) -> str:
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
