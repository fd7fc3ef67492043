"""A communicator that fails to close violates E5 once, and hides nothing else of the run."""

from contextlib import closing

import pytest
from conformance.mutants.large_collectives import SumsOneBlock
from conformance.mutants.subjects import gloo_with
from helpers.fakes.null_progress_listener import NullProgressListener

from equipoise.backends.cpu.gloo_communicator import GlooCommunicator
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.profile import Executor, Profile
from equipoise.hal.conformance.result import Finding, Status
from equipoise.hal.conformance.runner import PropertyRun, RunOptions, run_properties
from equipoise.hal.conformance.search import PropertyViolated
from equipoise.hal.errors import CommunicatorFailed

NAMES = (
    "every-collective-equals-its-definition",
    "groups-of-any-size-and-members-work",
    "a-rank-may-close-what-it-has-just-opened",
    "closing-ends-what-is-in-flight",
    "collectives-equal-their-definitions-at-any-size",
)
OPTIONS = RunOptions(Profile.CI, seed=0, cases=2)


class CloseRaises(GlooCommunicator):
    """Ends as it should, and then says that it could not."""

    def close(self) -> None:
        if not self.closed:
            super().close()
            raise CommunicatorFailed(f"destroying {self.purpose!r} failed: no name")


class CloseRaisesAndSumsOneBlock(CloseRaises, SumsOneBlock):
    """Has a second fault."""


def findings_of(communicator: type[GlooCommunicator]) -> list[Finding]:
    with closing(gloo_with(communicator=communicator)()) as subject:
        plan = [PropertyRun(suite.find(name), subject, Executor.RANKS) for name in NAMES]
        return list(run_properties(plan, OPTIONS, NullProgressListener()))


@pytest.mark.parametrize(
    ("communicator", "last"),
    [(CloseRaises, Status.HELD), (CloseRaisesAndSumsOneBlock, Status.VIOLATED)],
)
def test_failing_close_violates_its_own_clause_once(
    communicator: type[GlooCommunicator], last: Status
) -> None:
    first, *others = findings_of(communicator)
    assert isinstance(first.verdict, PropertyViolated)
    assert (first.property_name, first.clauses, first.verdict.clause) == (NAMES[0], ("E5",), "E5")
    assert "failed: no name" in first.verdict.what
    assert [finding.property_name for finding in others] == list(NAMES)
    assert [finding.status for finding in others] == [*[Status.HELD] * 4, last]


def test_case_of_failing_close_shows_it_again() -> None:
    (first, *_) = findings_of(CloseRaises)
    assert isinstance(first.verdict, PropertyViolated)
    prop = suite.find(NAMES[0])
    with (
        closing(gloo_with(communicator=CloseRaises)()) as subject,
        pytest.raises(Exception, match="E5: rank 0: closing a communicator raised"),
    ):
        subject.play(prop, first.verdict.case)
