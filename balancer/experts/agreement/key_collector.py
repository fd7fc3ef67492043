"""Deletes ballots and decisions from the store once no rank can need them.

A store keeps every ballot and every decision until it is told to forget them (C9). A rebalance asks
some dozens of questions, so a store would grow for as long as a model serves. When a question may
go is argued on `docs/design/engine.md`: once every member is seen to vote, without a failure, in a
rebalance, nobody will ever read or write what was asked in the ones before it.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from equipoise.balancer.experts.agreement.ballot import Ballot, RankStatus
from equipoise.balancer.experts.runtime.jobs import Job
from equipoise.balancer.experts.runtime.workers import Worker
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import BallotIncomplete, ControlPlaneLost

BEFORE_FIRST_REBALANCE = -1
"""The epoch of what was asked before the first one."""
MAX_KEYS_PER_VOTE = 4
"""Questions that are forgotten behind a vote at most: more than a vote adds, so that none are left
over, and few, so that the next ballot comes in time."""
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredKey:
    """A question of an epoch.

    Attributes:
        rebalance: in which it was asked.
        name: of the question.
        ranks: whose ballots there may be on it; empty where it was only decided.
    """

    rebalance: int
    name: str
    ranks: tuple[int, ...] = ()


class KeyCollector:
    """Forgets for all members, so that the store is asked once; the lowest member has one.

    Args:
        control: where it was asked.
        ranks: who is asked.
        worker: carries out votes, and forgets behind them.
        uncollected: of a group before this one, whose last vote all of `ranks` have left behind.
    """

    def __init__(
        self,
        control: ControlPlane,
        ranks: tuple[int, ...],
        worker: Worker,
        uncollected: Sequence[StoredKey] = (),
    ) -> None:
        self._control = control
        self._ranks = ranks
        self._worker = worker
        # Filled by the step's thread and emptied by the worker's; all else is the worker's alone.
        self._asked = deque(uncollected)
        self._kept: dict[str, StoredKey] = {}
        self._free: deque[StoredKey] = deque()

    def add(self, epoch: int, ballots: Sequence[str], outcome: str) -> None:
        """Members may cast ballots on these questions, and settle this one; returns at once."""
        self._asked.extend(StoredKey(epoch, name, self._ranks) for name in ballots)
        self._asked.append(StoredKey(epoch, outcome))

    def collect(self, epoch: int, ballots: str) -> None:
        """Forget what may go, once the vote on these ballots, begun just now, has ended."""
        self._worker.start(self._tidying(epoch, ballots), "forget", epoch=epoch)

    @property
    def uncollected(self) -> tuple[StoredKey, ...]:
        """What is not forgotten yet, for who comes after; asked when the worker is closed."""
        self._take()
        kept = (*self._free, *self._kept.values())
        return tuple(replace(filed, rebalance=BEFORE_FIRST_REBALANCE) for filed in kept)

    def _tidying(self, epoch: int, ballots: str) -> Job[None]:
        yield from ()
        try:
            self._release(epoch, ballots)
            for _ in range(min(MAX_KEYS_PER_VOTE, len(self._free))):
                filed = self._free.popleft()
                self._control.forget(filed.name, filed.ranks)
        except ControlPlaneLost as error:
            # Whether the rank can go on is for the next vote to say.
            LOG.warning("what was asked before epoch %d was not forgotten: %s", epoch, error)

    def _release(self, epoch: int, ballots: str) -> None:
        """What earlier epochs asked may go if every member is in this one."""
        self._take()
        old = [filed for filed in self._kept.values() if filed.rebalance < epoch]
        if old and self._all_in(ballots):
            self._free.extend(old)
            for filed in old:
                del self._kept[filed.name]

    def _all_in(self, ballots: str) -> bool:
        """Whether each member votes in this epoch, and none only says that it cannot.

        Who says so may still be in an epoch before.
        """
        try:
            texts = self._control.collect(ballots, 0.0, self._ranks)
        except BallotIncomplete:
            return False
        return all(Ballot.from_bytes(text).status is not RankStatus.FAILED for text in texts)

    def _take(self) -> None:
        while self._asked:
            filed = self._asked.popleft()
            self._kept[filed.name] = filed
