"""The report of a conformance run: lines for a terminal, and one HTML file without dependencies."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.hal.conformance.clauses import (
    CLAUSE_LETTERS,
    TITLES,
    clause_sort_key,
)
from equipoise.hal.conformance.expected_violations import Expectation, Shows
from equipoise.hal.conformance.profile import families_of
from equipoise.hal.conformance.reproduce import (
    MAX_WHAT_LINES,
    python_source,
    reproduction_of,
)
from equipoise.hal.conformance.result import (
    ClauseFinding,
    Finding,
    LevelFinding,
    LevelStatus,
    Status,
    SuiteResult,
)
from equipoise.hal.conformance.search import (
    PropertyHeld,
    PropertyNotJudged,
    PropertyReported,
    PropertyUnsupported,
    PropertyViolated,
)
from equipoise.report.page import flat_facts, render_page
from equipoise.report.terminal import ColourMode, TextStyle, styled

WIDTH = 80
NAME_WIDTH, STATUS_WIDTH = 5, 13
STATUS_SIGNS = {
    Status.HELD: "●",
    Status.VIOLATED: "✗",
    Status.EXPECTED: "⊗",
    Status.UNSUPPORTED: "○",
    Status.NOT_JUDGED: "?",
    Status.REPORTED: "≈",
}
"""Sign of each status in the matrix; a dot for a clause that no property judges."""
NOT_RUN_SIGN = "·"
MAX_NAMED = 5
"""Clauses that a level names as not judged; more are counted: after a standstill most are."""
STATUS_STYLES = {
    Status.HELD: TextStyle.GREEN,
    Status.VIOLATED: TextStyle.RED,
    Status.EXPECTED: TextStyle.BOLD,
    Status.UNSUPPORTED: TextStyle.DIM,
    Status.NOT_JUDGED: TextStyle.RED,
    Status.REPORTED: TextStyle.BOLD,
}


def render(result: SuiteResult, colours: ColourMode, programs: Path | None = None) -> str:
    """The whole text; its last line is `verdict(result)`. No line is wider than `WIDTH`, save
    where a name, a step or a path is longer.

    `programs` is the folder in which the programs of violations were written, if they were.
    """
    lines = [
        styled(headline(result), TextStyle.BOLD, colours),
        "",
        *(_clause(finding, colours) for finding in result.clauses()),
        *_violations(result, colours, programs),
        "",
        *matrix(result, colours),
        "",
        *_wrap(levels_line(result)),
        *(
            styled(line, TextStyle.RED, colours)
            for passed in result.unexpected_passes(Shows.ALWAYS)
            for line in _wrap(unexpected_pass(passed))
        ),
        *(
            line
            for passed in result.unexpected_passes(Shows.SOMETIMES)
            for line in _wrap(absent_race(passed))
        ),
        styled(verdict(result), TextStyle.RED if _failed(result) else TextStyle.GREEN, colours),
    ]
    return "\n".join(lines)


def headline(result: SuiteResult) -> str:
    """What was tested, and how."""
    ranks = f", up to {result.ranks} rank{'s' * (result.ranks != 1)}" if result.communicator else ""
    return f"conformance of {result.subject}{ranks}, profile {result.profile}, seed {result.seed}"


def verdict(result: SuiteResult) -> str:
    """The last line: counts, and how long it took."""
    counts = {status: result.count(status) for status in Status}
    totals = [f"{count} {status}" for status, count in counts.items() if count]
    return f"{_verdict_text(result)}: {', '.join(totals)}; {result.seconds:.0f} s"


def _verdict_text(result: SuiteResult) -> str:
    if result.interruption is not None:
        return "INTERRUPTED"
    if result.count(Status.VIOLATED):
        return "THE CONTRACT IS BROKEN"
    if result.unexpected_passes(Shows.ALWAYS):
        return "THE FILE OF EXPECTED VIOLATIONS IS WRONG"
    if result.exit_code:
        return "NOT EVERYTHING COULD BE JUDGED"
    if result.count(Status.EXPECTED):
        return "the contract is broken as expected"
    whole = set(families_of(result.target)) <= {finding.family for finding in result.findings}
    return "the contract is kept" if whole else "this part of the contract is kept"


def _failed(result: SuiteResult) -> bool:
    return bool(result.exit_code) or result.interruption is not None


def levels_line(result: SuiteResult) -> str:
    """Which levels are kept, in the words that a vendor can publish."""
    described: dict[LevelStatus, list[str]] = {status: [] for status in LevelStatus}
    for finding in result.levels():
        described[finding.status].append(_describe_level(finding))
    parts = [f"levels kept: {', '.join(described[LevelStatus.KEPT]) or 'none'}"]
    for status, word in (
        (LevelStatus.NOT_KEPT, "not"),
        (LevelStatus.NOT_DECLARED, "not declared"),
        (LevelStatus.NOT_JUDGED, "not judged"),
    ):
        if described[status]:
            parts.append(f"{word}: {', '.join(described[status])}")
    return "; ".join(parts)


def _describe_level(finding: LevelFinding) -> str:
    name = finding.level.value
    if finding.status is LevelStatus.NOT_KEPT:
        expected = finding.clauses(Status.EXPECTED)
        unjudged = finding.clauses(Status.NOT_JUDGED)
        words = [
            *finding.clauses(Status.VIOLATED),
            *(f"{clause} expected" for clause in expected),
            *(f"{clause} not judged" for clause in unjudged if len(unjudged) <= MAX_NAMED),
            *([f"{len(unjudged)} not judged"] if len(unjudged) > MAX_NAMED else []),
        ]
        return f"{name} ({', '.join(words)})"
    undeclared = finding.clauses(Status.UNSUPPORTED)
    if finding.status is LevelStatus.KEPT and undeclared:
        return f"{name} (without {', '.join(undeclared)})"
    return name


def unexpected_pass(expected: Expectation) -> str:
    """What is said of a violation that was expected and did not show."""
    return f"{expected} is expected to be violated and is held: remove it from the file of --xfail"


def absent_race(expected: Expectation) -> str:
    """What is said of one that shows sometimes and did not."""
    return f"{expected} is expected to be violated sometimes, and was held in this run"


def describe_clause(clause: ClauseFinding) -> str:
    """A clause's finding in words."""
    if clause.status is Status.UNSUPPORTED:
        return f"not declared: {clause.missing_capabilities}"
    if clause.status is Status.HELD:
        return f"{clause.cases} cases"
    if clause.status is Status.REPORTED:
        return clause.figures
    if clause.status is Status.EXPECTED:
        reasons = {f.expectation.reason: f.expectation for f in clause.findings if f.expectation}
        return "; ".join(
            f"{reason} ({expected.link})" if expected.link else reason
            for reason, expected in reasons.items()
        )
    broken = (Status.VIOLATED, Status.EXPECTED)
    names = sorted({f.property_name for f in clause.findings if f.status in broken})
    see = f"see {', '.join(names)}" if names else ""
    return "; ".join(filter(None, (see, clause.obstacles)))


def matrix(result: SuiteResult, colours: ColourMode) -> list[str]:
    """Family letters down, clause numbers across, a sign for each status."""
    statuses = {finding.clause: finding.status for finding in result.clauses()}
    most = max(clause_sort_key(clause)[1] for clause in TITLES)
    head = styled(
        "   " + "".join(f"{number:>3}" for number in range(1, most + 1)), TextStyle.DIM, colours
    )
    rows = [
        f"{letter:<3}" + "".join(_cells(letter, most, statuses, colours)).rstrip()
        for letter in CLAUSE_LETTERS
    ]
    legend = "   ".join(f"{sign} {status}" for status, sign in STATUS_SIGNS.items())
    return [
        head,
        *rows,
        styled(f"{legend}   {NOT_RUN_SIGN} not in this run", TextStyle.DIM, colours),
    ]


def violations(result: SuiteResult) -> list[Finding]:
    """The properties that do not hold."""
    return [finding for finding in result.findings if isinstance(finding.verdict, PropertyViolated)]


def program_lines(verdict: PropertyViolated) -> list[str]:
    """The shrunk program, numbered as its steps are, with its schedule."""
    head = [f"schedule {verdict.case.schedule.hex(' ')}"] if verdict.case.schedule else []
    return verdict.case.program.lines() + head


def program_name(finding: Finding) -> str:
    """Name of the file that plays the program of a violation."""
    closing = "-and-its-closing" if finding.only_closing else ""
    return f"{finding.property_name}{closing}.py"


def program_source(result: SuiteResult, finding: Finding) -> str:
    """The text of that file."""
    assert isinstance(finding.verdict, PropertyViolated)
    about = f"violated by {result.subject}, profile {result.profile}, seed {result.seed}"
    return python_source(reproduction_of(result, finding), about, finding.verdict.what)


def run_command(result: SuiteResult, path: Path) -> str:
    """The command that plays it."""
    return f"{result.launcher} python {path}".strip()


def _clause(finding: ClauseFinding, colours: ColourMode) -> str:
    word = finding.status.value
    if finding.status is Status.HELD:
        word += f" {finding.cases}"
    status = styled(f"{word:<{STATUS_WIDTH}}", STATUS_STYLES[finding.status], colours)
    line = f"{finding.clause:<{NAME_WIDTH}}{status}{TITLES.get(finding.clause, '')}"
    if finding.status is Status.HELD:
        return line
    margin = " " * (NAME_WIDTH + STATUS_WIDTH)
    explanation = "\n".join(_wrap(describe_clause(finding), margin, margin))
    return f"{line}\n{styled(explanation, TextStyle.DIM, colours)}"


def _wrap(text: str, first: str = "", later: str = "  ") -> list[str]:
    """Lines with these indents. Names and paths stay whole: they are copied into `--only`,
    `--xfail` and searches."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _violations(result: SuiteResult, colours: ColourMode, programs: Path | None) -> Iterable[str]:
    for finding in violations(result):
        assert isinstance(finding.verdict, PropertyViolated)
        yield ""
        title = f"{finding.property_name} ({finding.executor})"
        if finding.expectation is not None:
            title = f"expected: {title}"
        yield styled(title, STATUS_STYLES[finding.status], colours)
        yield from _what(finding.verdict.what)
        yield f"smallest program found, of {finding.verdict.cases} played:"
        yield from (f"    {line}" for line in program_lines(finding.verdict))
        if programs is not None:
            yield f"run it: {run_command(result, programs / program_name(finding))}"
    if programs is None and violations(result):
        yield ""
        yield "--out DIR writes these programs as Python files that run by themselves"


def _what(text: str) -> Iterable[str]:
    """What was seen, line by line: a rank that hangs or dies is quoted with its stacks."""
    lines = text.splitlines()
    for line in lines[:MAX_WHAT_LINES]:
        yield from _wrap(line)
    if len(lines) > MAX_WHAT_LINES:
        yield f"({len(lines) - MAX_WHAT_LINES} more lines: --json FILE writes all of them)"


def _cells(
    letter: str, most: int, statuses: dict[str, Status], colours: ColourMode
) -> Sequence[str]:
    return [_terminal_cell(f"{letter}{number}", statuses, colours) for number in range(1, most + 1)]


def _terminal_cell(clause: str, statuses: dict[str, Status], colours: ColourMode) -> str:
    if clause not in TITLES:
        return "   "
    status = statuses.get(clause)
    if status is None:
        return "  " + styled(NOT_RUN_SIGN, TextStyle.DIM, colours)
    return "  " + styled(STATUS_SIGNS[status], STATUS_STYLES[status], colours)


LEVEL_CLASSES = {
    LevelStatus.KEPT: "held",
    LevelStatus.NOT_KEPT: "violated",
    LevelStatus.NOT_DECLARED: "unsupported",
    LevelStatus.NOT_JUDGED: "absent",
}


def render_html(result: SuiteResult, about: Mapping[str, Any]) -> str:
    """The whole file as text; `about` holds version, command, machine and time."""
    clauses = {finding.clause: finding for finding in result.clauses()}
    most = max(clause_sort_key(clause)[1] for clause in TITLES)
    shown = {name: value for name, value in about.items() if name not in ("command", "equipoise")}
    return render_page(
        "conformance.html",
        command=str(about.get("command", "")),
        title=f"Conformance of {result.subject}",
        headline=headline(result),
        verdict_class="bad" if _failed(result) else "good",
        verdict=verdict(result),
        levels_line=levels_line(result),
        passes=[unexpected_pass(one) for one in result.unexpected_passes(Shows.ALWAYS)],
        races=[absent_race(one) for one in result.unexpected_passes(Shows.SOMETIMES)],
        tiles=_tiles(result),
        violations=[_violation(result, finding) for finding in violations(result)],
        levels=[
            (one.level.value, (one.status.value, LEVEL_CLASSES[one.status]), _describe_level(one))
            for one in result.levels()
        ],
        numbers=range(1, most + 1),
        grid=[
            (letter, [_html_cell(f"{letter}{number}", clauses) for number in range(1, most + 1)])
            for letter in CLAUSE_LETTERS
        ],
        legend="; ".join(f"{sign} {status}" for status, sign in STATUS_SIGNS.items()),
        not_run=NOT_RUN_SIGN,
        clauses=[
            (name, _marked(clause.status), TITLES.get(name, ""), describe_clause(clause))
            for name, clause in clauses.items()
        ],
        properties=[
            (
                finding.property_name,
                ", ".join(finding.clauses),
                finding.executor,
                _marked(finding.status),
                (_figure_or_reason(finding), "num"),
                (f"{finding.seconds:.2f} s", "num"),
            )
            for finding in result.findings
        ],
        about=flat_facts(shown),
    )


def _tiles(result: SuiteResult) -> list[tuple[str, str]]:
    played = sum(_played(finding) for finding in result.findings)
    return [
        (f"{result.count(Status.HELD)}", "clauses held"),
        (f"{result.count(Status.VIOLATED)}", "violated"),
        (f"{result.count(Status.UNSUPPORTED)}", "declared unsupported"),
        (f"{len({finding.property_name for finding in result.findings})}", "properties"),
        (f"{played:,}", "programs played"),
    ]


def _played(finding: Finding) -> int:
    if isinstance(finding.verdict, PropertyHeld | PropertyViolated):
        return finding.verdict.cases
    return 0


def _violation(result: SuiteResult, finding: Finding) -> dict[str, object]:
    assert isinstance(finding.verdict, PropertyViolated)
    word = "Expected violation" if finding.expectation else "Violated"
    return {
        "title": f"{word}: {finding.verdict.clause}",
        "what": finding.verdict.what,
        "where": f"{finding.property_name}, on {finding.executor}",
        "cases": finding.verdict.cases,
        "program": "\n".join(program_lines(finding.verdict)),
        "source": program_source(result, finding),
    }


def _html_cell(clause: str, findings: Mapping[str, ClauseFinding]) -> dict[str, str | None] | None:
    """A cell of the grid: sign, class, title, and where it links to, if anywhere."""
    if clause not in TITLES:
        return None
    title = f"{clause}: {TITLES[clause]}"
    if clause not in findings:
        return {"sign": NOT_RUN_SIGN, "css": "absent", "title": title, "link": None}
    status = findings[clause].status
    return {"sign": STATUS_SIGNS[status], "css": _class(status), "title": title, "link": clause}


def _figure_or_reason(finding: Finding) -> str:
    if isinstance(finding.verdict, PropertyUnsupported):
        return finding.verdict.capability
    if isinstance(finding.verdict, PropertyNotJudged):
        return finding.verdict.reason
    if isinstance(finding.verdict, PropertyReported):
        return finding.verdict.figure
    count = finding.verdict.cases
    return (
        f"{count} cases"
        if isinstance(finding.verdict, PropertyHeld)
        else f"in case {count} at latest"
    )


def _marked(status: Status) -> tuple[str, str]:
    """The word of a status, and the class that colours it."""
    return status.value, _class(status)


def _class(status: Status) -> str:
    return status.value.replace(" ", "-")
