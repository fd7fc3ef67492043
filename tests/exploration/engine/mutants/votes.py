"""Mutants of the vote: who is asked, what is compared, and who is obeyed."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from exploration.engine.case import FaultKind
from exploration.engine.mutants.mutant import Mutant, with_fault

from equipoise.balancer.experts.agreement.ballot import (
    Abort,
    Ballot,
    ChunkChecksum,
    Commit,
    Pending,
    Verdict,
    VoteSpec,
    _tally_when_complete,
    tally,
    to_decision,
    vote,
)
from equipoise.balancer.experts.runtime.jobs import BallotsReady, Job
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import BallotIncomplete, ControlPlaneLost, VoteOutcomeUnknown

Blank = Callable[[ChunkChecksum], ChunkChecksum]


def without_vote(control: ControlPlane, spec: VoteSpec, ballot: Ballot) -> Job[Verdict]:
    """Settle for a commit when the own staging is full, and do so."""
    if not ballot.staged:
        return (yield from vote(control, spec, ballot))
    with suppress(ControlPlaneLost):
        control.cast(spec.ballots, ballot.to_bytes())
        control.decide(spec.outcome, to_decision(Commit(len(ballot.staged))))
    return Commit(len(ballot.staged))


def own_wish(control: ControlPlane, spec: VoteSpec, ballot: Ballot) -> Job[Verdict]:
    """Write the wish down, and obey it whatever the answer is."""
    try:
        control.cast(spec.ballots, ballot.to_bytes())
        wish = yield from _tally_when_complete(control, spec)
        if not isinstance(wish, Pending):
            control.decide(spec.outcome, to_decision(wish))
        return wish
    except ControlPlaneLost as error:
        raise VoteOutcomeUnknown(str(error)) from error


def guessing(control: ControlPlane, spec: VoteSpec, ballot: Ballot) -> Job[Verdict]:
    """Take it for an abort when the outcome cannot be learnt."""
    try:
        return (yield from vote(control, spec, ballot))
    except VoteOutcomeUnknown:
        return Abort("guessed")


def never_final(
    ballots: str, outcome: str, final_attempt: bool, ranks: tuple[int, ...]
) -> VoteSpec:
    """No attempt is the final one."""
    return VoteSpec(ballots, outcome, False, ranks)


def endless(control: ControlPlane, spec: VoteSpec, ballot: Ballot) -> Job[Verdict]:
    """Wait for ballots again, each time that they do not come."""
    try:
        control.cast(spec.ballots, ballot.to_bytes())
        while True:
            with suppress(BallotIncomplete):
                yield BallotsReady(control, spec.ballots, spec.ranks)
                break
        return (yield from vote(control, spec, ballot))
    except ControlPlaneLost as error:
        raise VoteOutcomeUnknown(str(error)) from error


def blind_to_bytes(ballots: Sequence[Ballot]) -> Verdict:
    """Nobody compares what was sent with what was received."""
    return tally([_blanked(ballot, _without_sums) for ballot in ballots])


def blind_to_tables(ballots: Sequence[Ballot]) -> Verdict:
    """Nobody compares the tables of a chunk."""
    return tally([_blanked(ballot, _without_tables) for ballot in ballots])


def blind_to_plans(ballots: Sequence[Ballot]) -> Verdict:
    """Nobody compares plans."""
    return tally([replace(ballot, digest="") for ballot in ballots])


def _without_sums(checksum: ChunkChecksum) -> ChunkChecksum:
    return replace(checksum, sent=0, received=0)


def _without_tables(checksum: ChunkChecksum) -> ChunkChecksum:
    return replace(checksum, tables="")


def _blanked(ballot: Ballot, blank: Blank) -> Ballot:
    return replace(ballot, staged=tuple(map(blank, ballot.staged)))


MUTANTS = (
    Mutant(
        name="no-vote",
        broken="a rank commits when its own staging is full",
        property="one-generation",
        patches={"engine.engine.vote": without_vote},
    ),
    Mutant(
        name="own-wish",
        broken="a rank does what it wished, not what was decided first",
        property="same-history",
        patches={"engine.engine.vote": own_wish},
        reaches=with_fault(FaultKind.BALLOT_LOST),
    ),
    Mutant(
        name="guess",
        broken="a rank that cannot learn the outcome takes it for an abort",
        property="same-history",
        patches={"engine.engine.vote": guessing},
    ),
    Mutant(
        name="never-final",
        broken="a rebalance may wait for ever",
        property="accounted",
        patches={"engine.engine.VoteSpec": never_final},
        reaches=with_fault(FaultKind.MESSAGE_LOST),
    ),
    Mutant(
        name="endless-vote",
        broken="a ballot that is lost is waited for again and again",
        property="no-hang",
        patches={"engine.engine.vote": endless},
    ),
    Mutant(
        name="bytes-not-compared",
        broken="nobody compares staged bytes with those of their sources",
        property="right-weights",
        patches={"agreement.ballot.tally": blind_to_bytes},
    ),
    Mutant(
        name="tables-not-compared",
        broken="nobody compares the tables that are committed",
        property="one-generation",
        patches={"agreement.ballot.tally": blind_to_tables},
    ),
    Mutant(
        name="plans-not-compared",
        broken="nobody compares plans",
        property="explained",
        patches={"agreement.ballot.tally": blind_to_plans},
        reaches=with_fault(FaultKind.OTHER_PLAN),
    ),
)
