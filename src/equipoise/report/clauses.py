"""What a conformance run ends with on a terminal: a line a clause, violations, a matrix."""

import textwrap
from collections.abc import Iterable, Sequence

from equipoise.hal.conformance.clauses import FAMILIES, ORDER, TITLES, place
from equipoise.hal.conformance.result import ClauseFinding, Finding, Result, Status
from equipoise.hal.conformance.search import Violated
from equipoise.report.ink import Ink, Tint, paint

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
    return [_cell(f"{letter}{number}", known, ink) for number in range(1, most + 1)]


def _cell(clause: str, known: dict[str, Status], ink: Ink) -> str:
    if clause not in TITLES:
        return "   "
    status = known.get(clause)
    if status is None:
        return "  " + paint(ABSENT, Tint.DIM, ink)
    return "  " + paint(SIGNS[status], TINTS[status], ink)
