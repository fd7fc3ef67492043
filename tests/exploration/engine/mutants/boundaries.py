"""Mutants of what happens at a boundary: verdicts that are late, work that is dropped."""

from dataclasses import dataclass

from exploration.engine.case import FaultKind
from exploration.engine.lane import LaneTask
from exploration.engine.mutants.mutant import Mutant, with_fault

from equipoise.balancer.experts.agreement.ballot import Pending, Verdict
from equipoise.balancer.experts.engine.engine import RebalanceEngine
from equipoise.balancer.experts.engine.share_refresh import LaggedShares, NotSolving, Solving
from equipoise.balancer.experts.engine.states import Draining, Idle, State, Voting
from equipoise.balancer.experts.runtime.jobs import Job


class LateVerdicts(RebalanceEngine):
    """Acts on the last verdict that has come, of whatever vote or rebalance, and waits for none."""

    _last_verdict: Verdict = Pending()

    def _settle_vote(self, state: Voting, step: int) -> Job[State]:
        assert self._vote is not None
        if self._vote.done():
            self._last_verdict = self._vote.result()
        vote: LaneTask[Verdict] = LaneTask()
        vote.end(self._last_verdict)
        self._vote = vote
        return (yield from super()._settle_vote(state, step))


class ForgetsToDrain(RebalanceEngine):
    """Leaves an aborted rebalance at once, and drops what still runs for it."""

    def _abort(self, state: Voting, step: int, reason: str) -> State:
        super()._abort(state, step, reason)
        self._workers.transfer.close()
        return Idle()


@dataclass(frozen=True)
class NeverDrained(Draining):
    """What an aborted rebalance has left behind never counts as ended."""

    @property
    def done(self) -> bool:
        return False


class UncountedAborts(RebalanceEngine):
    """Reports an abort, and does not count it."""

    def _abort(self, state: Voting, step: int, reason: str) -> State:
        after = super()._abort(state, step, reason)
        self.aborts.clear()
        return after


class SharesWhenReady(LaggedShares):
    """Installs renewed shares when they are solved, not one boundary after their sum."""

    def _install_solution(self) -> Job[None]:
        if isinstance(self._state, Solving) and self._state.new_shares.done():
            yield from super()._install_solution()


class SwallowsErrors(LaggedShares):
    """Goes on with the shares it has when solving fails."""

    def _install_solution(self) -> Job[None]:
        try:
            yield from super()._install_solution()
        except Exception:
            self._state = NotSolving()


MUTANTS = (
    Mutant(
        name="late-signal",
        broken="the verdict of an earlier vote is acted on, in whatever rebalance",
        property="explained",
        patches={"balancer.RebalanceEngine": LateVerdicts},
    ),
    Mutant(
        name="abort-without-drain",
        broken="what runs for an aborted rebalance is dropped",
        property="nothing-left",
        patches={"balancer.RebalanceEngine": ForgetsToDrain},
    ),
    Mutant(
        name="drain-without-end",
        broken="an aborted rebalance drains for ever",
        property="recovers",
        patches={"engine.engine.Draining": NeverDrained},
    ),
    Mutant(
        name="abort-not-counted",
        broken="aborts are not counted",
        property="accounted",
        patches={"balancer.RebalanceEngine": UncountedAborts},
    ),
    Mutant(
        name="shares-when-ready",
        broken="a rank renews shares when it has solved them",
        property="one-generation",
        patches={"balancer.LaggedShares": SharesWhenReady},
    ),
    Mutant(
        name="solver-error-swallowed",
        broken="a rank whose solver fails keeps its shares and goes on",
        property="one-generation",
        patches={"balancer.LaggedShares": SwallowsErrors},
        reaches=with_fault(FaultKind.SOLVER_RAISES),
    ),
)
