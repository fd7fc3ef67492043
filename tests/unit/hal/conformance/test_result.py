"""What a run says: levels, expected violations, exit code, and the lines that show them."""

import dataclasses
from collections.abc import Sequence

import pytest
from helpers.harnesses.html_pages import assert_every_text_is_escaped

from equipoise.hal.conformance import suite
from equipoise.hal.conformance.clauses import LEVELS, Level
from equipoise.hal.conformance.expected_violations import Expectation, Shows
from equipoise.hal.conformance.program import Case, Step, make_program
from equipoise.hal.conformance.result import Finding, LevelStatus, Status, SuiteResult
from equipoise.hal.conformance.search import (
    PropertyHeld,
    PropertyNotJudged,
    PropertyUnsupported,
    PropertyViolated,
    Verdict,
)
from equipoise.report.conformance import levels_line, render, render_html
from equipoise.report.terminal import ColourMode

HELD = PropertyHeld(12)
RESULT, FAILED = "result-does-not-block-after-done", "a-failed-work-raises-at-every-call"
FAULT = "a-fault-ends-what-depends-on-it-and-nothing-else"
ABORT, REBUILD = (
    "abort-ends-what-is-in-flight",
    "a-rebuilt-communicator-carries-only-what-came-after",
)
K5 = Expectation(clause="K5", reason="may time out", link="https://x.example/1")


def violated(clause: str) -> PropertyViolated:
    return PropertyViolated(clause, "what was seen", Case(make_program([Step("isend", (1,))])), 3)


def finding(name: str, verdict: Verdict, expectation: Expectation | None = None) -> Finding:
    prop = suite.find(name)
    return Finding(
        property_name=name,
        family=prop.family,
        clauses=prop.clauses,
        executor="ranks",
        verdict=verdict,
        seconds=0.5,
        expectation=expectation,
    )


def result(
    findings: Sequence[Finding],
    partial: Sequence[Level] = (),
    expectations: Sequence[Expectation] = (),
) -> SuiteResult:
    return SuiteResult(
        backend="cpu",
        communicator="gloo",
        ranks=2,
        profile="ci",
        seed=0,
        findings=tuple(findings),
        seconds=1.0,
        partial_levels=frozenset(partial),
        expectations=tuple(expectations),
    )


ELASTIC_CASES = [
    ([HELD, HELD], (), LevelStatus.KEPT, "levels kept: elastic"),
    (
        [PropertyUnsupported("abort"), HELD],
        (),
        LevelStatus.KEPT,
        "levels kept: elastic (without E8)",
    ),
    (
        [PropertyUnsupported("abort"), PropertyUnsupported("rebuild")],
        (),
        LevelStatus.NOT_DECLARED,
        "not declared: elastic",
    ),
    ([HELD, violated("E9")], (), LevelStatus.NOT_KEPT, "not: elastic (E9)"),
    ([HELD, violated("C8")], (), LevelStatus.NOT_KEPT, "elastic (E9 not judged)"),
    ([HELD, violated("E9")], [Level.ELASTIC], LevelStatus.NOT_KEPT, "not: elastic (E9)"),
    ([HELD, HELD], [Level.ELASTIC], LevelStatus.NOT_JUDGED, "not judged: core, fault, stream, el"),
]


@pytest.mark.parametrize(("verdicts", "partial", "status", "words"), ELASTIC_CASES)
def test_level_is_kept_when_all_its_clauses_are(
    verdicts: list[Verdict], partial: Sequence[Level], status: LevelStatus, words: str
) -> None:
    pair = zip((ABORT, REBUILD), verdicts, strict=True)
    found = result([finding(name, verdict) for name, verdict in pair], partial)
    [elastic] = [level for level in found.levels() if level.level is Level.ELASTIC]
    assert elastic.status is status
    assert words in levels_line(found)
    assert found.to_json()["levels"]["elastic"]["status"] == status.value


def test_level_ignores_unjudged_clause_in_property_of_other_level() -> None:
    """R1 is of the core; the property of faults, which failed for E1, judges it too."""
    core = finding("dropped-objects-release-their-resources", HELD)
    found = result([core, finding(FAULT, violated("E1"))])
    statuses = {level.level: level.status for level in found.levels()}
    assert statuses[Level.CORE] is LevelStatus.KEPT
    assert statuses[Level.FAULT] is LevelStatus.NOT_KEPT


def test_level_counts_violation_by_property_of_other_level() -> None:
    core = finding("dropped-objects-release-their-resources", HELD)
    found = result([core, finding(FAULT, violated("R1"))])
    [level] = [level for level in found.levels() if level.level is Level.CORE]
    assert level.status is LevelStatus.NOT_KEPT
    assert level.clauses(Status.VIOLATED) == ["R1"]


def test_expected_violation_does_not_fail_run() -> None:
    found = result([finding(RESULT, violated("K5"), K5), finding(FAILED, HELD)], (), [K5])
    assert found.exit_code == 0
    [k5] = [clause for clause in found.clauses() if clause.clause == "K5"]
    assert k5.status is Status.EXPECTED
    text = render(found, ColourMode.PLAIN)
    assert "may time out (https://x.example/1)" in text
    assert f"expected: {RESULT} (ranks)" in text
    assert "not: core (K5 expected)" in text
    assert "the contract is broken as expected" in text.splitlines()[-1]
    assert "Expected violation: K5" in render_html(found, {})


def test_property_that_was_not_judged_fails_run_and_says_why() -> None:
    """Also where the violation that stands in the way is expected."""
    stuck = PropertyNotJudged("a stream stands still since x was played")
    found = result([finding(RESULT, violated("K5"), K5), finding(ABORT, stuck)], (), [K5])
    assert found.exit_code == 1
    text = render(found, ColourMode.PLAIN)
    assert "a stream stands still since x was played" in text
    assert text.splitlines()[-1].startswith("NOT EVERYTHING COULD BE JUDGED: 1 expected, 2 not")
    assert found.to_json()["clauses"]["E8"]["reason"] == stuck.reason
    assert stuck.reason in render_html(found, {})


def test_level_counts_clauses_that_were_not_judged_where_they_are_many() -> None:
    stuck = PropertyNotJudged("a stream stands still")
    core = [prop for prop in suite.properties() if LEVELS.get(prop.clauses[0]) is Level.CORE]
    found = result([finding(prop.name, stuck) for prop in core])
    [level] = [level for level in found.levels() if level.level is Level.CORE]
    count = len(level.clauses(Status.NOT_JUDGED))
    assert count > 5
    assert f"not: core ({count} not judged)" in levels_line(found)


def test_interrupted_run_shows_what_was_found() -> None:
    found = dataclasses.replace(
        result([finding(RESULT, violated("K5"))], list(Level)), interruption=KeyboardInterrupt()
    )
    text = render(found, ColourMode.PLAIN)
    assert f"{RESULT} (ranks)" in text
    assert text.splitlines()[-1].startswith("INTERRUPTED: 1 violated")
    assert found.to_json()["interrupted"] is True
    assert found.to_json()["exit_code"] is None


def test_stacks_are_shown_line_by_line_and_cut() -> None:
    stacks = "E1: rank 1 was killed by SIGSEGV\n" + "\n".join(f"  frame {n}" for n in range(30))
    verdict = dataclasses.replace(violated("E1"), what=stacks)
    lines = render(result([finding(FAULT, verdict)]), ColourMode.PLAIN).splitlines()
    place = lines.index("E1: rank 1 was killed by SIGSEGV")
    assert lines[place + 1] == "  frame 0"
    assert "  frame 20" not in lines
    assert "(11 more lines: --json FILE writes all of them)" in lines


def test_names_and_paths_stay_whole_in_wrapped_text() -> None:
    """They are copied: a property into `--only` and `--xfail`, a path into a search."""
    path = f"/{'folder/' * 14}unbound_buffer.cc:78"
    verdict = dataclasses.replace(violated("K5"), what=f"K5: rank 0: raised OSError: [{path}] late")
    findings = [finding(name, verdict) for name in (RESULT, FAILED)]
    lines = render(result(findings), ColourMode.PLAIN).splitlines()
    assert any(path in line for line in lines)
    explanation = lines[next(n for n, line in enumerate(lines) if line.startswith("K5 ")) + 1 :]
    assert explanation[:2] == [f"{'':18}see {FAILED},", f"{'':18}{RESULT}"]


def test_conformance_page_escapes_every_text() -> None:
    expected = Expectation(clause="K5", reason="r", shows=Shows.ALWAYS)
    found = result([finding(RESULT, violated("K5"), K5), finding(FAILED, HELD)], (), [expected])
    about = {"command": "equipoise conformance", "machine": {"processor": "p"}, "finished": "now"}
    assert_every_text_is_escaped("equipoise.report.conformance", lambda: render_html(found, about))


def test_expectation_covers_no_violation_of_other_property() -> None:
    """One property violates K5 as expected, another one does so too: the run fails."""
    found = result([finding(RESULT, violated("K5"), K5), finding(FAILED, violated("K5"))])
    assert found.exit_code == 1
    assert found.count(Status.VIOLATED) == 1
    assert found.count(Status.EXPECTED) == 0


@pytest.mark.parametrize(("shows", "code"), [(Shows.ALWAYS, 1), (Shows.SOMETIMES, 0)])
def test_unexpected_pass_is_told_and_fails_unless_race(shows: Shows, code: int) -> None:
    expected = Expectation(clause="K5", reason="r", shows=shows)
    found = result([finding(RESULT, HELD), finding(FAILED, HELD)], (), [expected])
    assert found.exit_code == code
    assert found.unexpected_passes(shows) == [expected]
    text = render(found, ColourMode.PLAIN)
    if code:
        assert "K5 is expected to be violated and is held: remove it" in text
        assert text.splitlines()[-1].startswith("THE FILE OF EXPECTED VIOLATIONS IS WRONG: ")
    else:
        assert "K5 is expected to be violated sometimes, and was held in this run" in text


def test_pass_of_property_counts_for_expectation_that_names_it() -> None:
    named = Expectation(clause="K5", reason="r", property=RESULT)
    other = Expectation(clause="K5", reason="r", property=FAILED)
    findings = [finding(RESULT, HELD), finding(FAILED, violated("K5"), other)]
    assert result(findings, (), [named, other]).unexpected_passes(Shows.ALWAYS) == [named]


def test_expectation_of_clause_outside_run_is_no_pass() -> None:
    unsupported = PropertyUnsupported("abort")
    expected = [Expectation(clause=clause, reason="r") for clause in ("E8", "V4")]
    found = result([finding(ABORT, unsupported)], (), expected)
    assert found.unexpected_passes(Shows.ALWAYS) == []
    assert found.exit_code == 0
