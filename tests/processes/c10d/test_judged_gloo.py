"""torch's gloo, judged as it is: exactly what docs/foreign-communicators.md says."""

from contextlib import closing

import pytest

from equipoise.hal.conformance import suite
from equipoise.hal.conformance.executors.processes import ProcessSubject
from equipoise.hal.conformance.search import (
    PropertyHeld,
    PropertyUnsupported,
    PropertyViolated,
    SearchSettings,
    Verdict,
    search,
)

CASES = 12
HELD = (
    "operations-own-their-buffers",
    "sends-need-not-wait-for-receives",
    "messages-between-two-ranks-keep-their-order",
    "communicators-progress-independently",
    "every-collective-equals-its-definition",
    "every-dtype-and-shape-is-transported",
    "uneven-rows-arrive",
    "sums-are-the-same-bits-each-time-and-on-every-rank",
    "bits-survive-every-transport",
)
VIOLATED = {
    "result-does-not-block-after-done": "K5",
    "overlapping-operands-are-as-good-as-separate-ones-or-refused": "A3",
    "layouts-are-copied-right-or-rejected": "S2",
    "unsupported-calls-raise-before-any-side-effect": "X5",
}
UNSUPPORTED = {
    "operations-are-ordered-after-the-current-stream": "stream_ordered",
    "a-cancelled-operation-keeps-its-buffers-and-fails-its-communicator": "operations: cancel",
    "abort-ends-what-is-in-flight": "abort",
    "a-rebuilt-communicator-carries-only-what-came-after": "rebuild",
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    names = (*HELD, *VIOLATED, *UNSUPPORTED)
    with closing(ProcessSubject("cpu", "c10d:gloo", 2)) as subject:
        settings = SearchSettings(cases=CASES, seed=0, max_shrinks=0)
        return {name: search(suite.find(name), subject, settings) for name in names}


@pytest.mark.parametrize("name", HELD)
def test_gloo_keeps_clause(verdicts: dict[str, Verdict], name: str) -> None:
    assert isinstance(verdicts[name], PropertyHeld), verdicts[name]


@pytest.mark.parametrize(("name", "clause"), VIOLATED.items())
def test_gloo_breaks_clause(verdicts: dict[str, Verdict], name: str, clause: str) -> None:
    verdict = verdicts[name]
    assert isinstance(verdict, PropertyViolated)
    assert verdict.clause == clause, verdict.what


@pytest.mark.parametrize(("name", "capability"), UNSUPPORTED.items())
def test_gloo_declares_no_capability(
    verdicts: dict[str, Verdict], name: str, capability: str
) -> None:
    verdict = verdicts[name]
    assert isinstance(verdict, PropertyUnsupported)
    assert verdict.capability == capability
