"""Mutants of forgetting: what a rank may still have to read is gone."""

from contextlib import suppress

from exploration.engine.case import FaultKind
from exploration.engine.mutants.mutant import Mutant, with_fault

from equipoise.balancer.experts.agreement.ballot import Ballot, Pending, Verdict, VoteSpec, vote
from equipoise.balancer.experts.agreement.key_collector import KeyCollector
from equipoise.balancer.experts.runtime.jobs import Job
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import ControlPlaneLost


def forgetful(control: ControlPlane, spec: VoteSpec, ballot: Ballot) -> Job[Verdict]:
    """Forget an outcome as soon as it is known here."""
    verdict = yield from vote(control, spec, ballot)
    if not isinstance(verdict, Pending):
        with suppress(ControlPlaneLost):
            control.forget(spec.outcome)
    return verdict


class Unseen(KeyCollector):
    """Takes it that everybody is where this rank is."""

    def _all_voting(self, ballots: str) -> bool:
        return True


MUTANTS = (
    Mutant(
        name="forgotten-when-known",
        broken="the first rank that knows an outcome forgets it",
        property="same-history",
        patches={"engine.engine.vote": forgetful},
        reaches=with_fault(FaultKind.BALLOT_LOST),
    ),
    Mutant(
        name="forgotten-unseen",
        broken="earlier rebalances are forgotten before every rank is seen in this one",
        property="same-history",
        patches={"balancer.KeyCollector": Unseen},
        reaches=with_fault(FaultKind.HASTY_VOTE),
    ),
)
