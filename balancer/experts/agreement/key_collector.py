"""Deletes ballots and decisions from the store once no rank can need them.

A store keeps ballots and decisions until they are deleted (C9). A rebalance uses some dozens of
keys, so the store would grow for as long as a model serves. Once every member has voted in a
rebalance without a failure, no rank reads or writes keys of earlier rebalances any more; the proof
is in `docs/design/engine.md`.
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
"""The rebalance of keys that are older than the first one."""
MAX_KEYS_PER_VOTE = 4
"""Upper limit of deletions after a vote: more than a vote adds, so that keys do not accumulate, and
few, so that the next ballot is cast in time."""
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredKey:
    """A key that a rebalance has used.

    Attributes:
        rebalance: number of the rebalance.
        name: the key.
        ranks: ranks that may have cast ballots under it; empty for a decision.
    """

    rebalance: int
    name: str
    ranks: tuple[int, ...] = ()


class KeyCollector:
    """Deletes keys for all members; only the lowest member has one, so each key is deleted once.

    Args:
        control: the control plane with the store.
        ranks: the members.
        worker: the vote worker, which deletes after votes.
        uncollected: keys of the previous group, whose last vote is over for all of `ranks`.
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
        # Filled by the step's thread and emptied by the worker's: a deque's ends need no lock. All
        # other fields are used by the worker's thread only.
        self._new_keys = deque(uncollected)
        self._keys: dict[str, StoredKey] = {}
        self._collectable: deque[StoredKey] = deque()

    def add(self, rebalance: int, ballots: Sequence[str], outcome: str) -> None:
        """Notes the keys of votes and of their outcome; returns at once."""
        self._new_keys.extend(StoredKey(rebalance, name, self._ranks) for name in ballots)
        self._new_keys.append(StoredKey(rebalance, outcome))

    def collect(self, rebalance: int, ballots: str) -> None:
        """Queues the deletion of old keys after the vote on these ballots."""
        self._worker.start(self._collect_job(rebalance, ballots), "forget", rebalance=rebalance)

    @property
    def uncollected(self) -> tuple[StoredKey, ...]:
        """Keys that are not deleted yet, for the next group; read after the worker is closed."""
        self._take_new_keys()
        keys = (*self._collectable, *self._keys.values())
        return tuple(replace(key, rebalance=BEFORE_FIRST_REBALANCE) for key in keys)

    def _collect_job(self, rebalance: int, ballots: str) -> Job[None]:
        yield from ()
        try:
            self._find_collectable(rebalance, ballots)
            for _ in range(min(MAX_KEYS_PER_VOTE, len(self._collectable))):
                key = self._collectable.popleft()
                self._control.forget(key.name, key.ranks)
        except ControlPlaneLost as error:
            # Not an error here: if the store is lost, the next vote raises.
            LOG.warning("keys from before rebalance %d were not deleted: %s", rebalance, error)

    def _find_collectable(self, rebalance: int, ballots: str) -> None:
        """Marks keys of earlier rebalances for deletion, if every member votes in this one."""
        self._take_new_keys()
        old = [key for key in self._keys.values() if key.rebalance < rebalance]
        if old and self._all_voting(ballots):
            self._collectable.extend(old)
            for key in old:
                del self._keys[key.name]

    def _all_voting(self, ballots: str) -> bool:
        """Returns whether each member votes in this rebalance with a status other than failed.

        A rank with a failed ballot may still be in an earlier rebalance.
        """
        try:
            texts = self._control.collect(ballots, 0.0, self._ranks)
        except BallotIncomplete:
            return False
        return all(Ballot.from_bytes(text).status is not RankStatus.FAILED for text in texts)

    def _take_new_keys(self) -> None:
        while self._new_keys:
            key = self._new_keys.popleft()
            self._keys[key.name] = key
