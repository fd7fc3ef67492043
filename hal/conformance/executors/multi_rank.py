"""Plays cases on several ranks, each in its own process; a `RankGroup` starts them.

This side runs hypothesis. Every request goes to the ranks that it concerns, and all their replies
are collected before the next one, so a rank that fails strands no other.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from equipoise.hal.communicator import Rendezvous
from equipoise.hal.conformance.clauses import CLOSING
from equipoise.hal.conformance.executors.property_reference import property_reference
from equipoise.hal.conformance.executors.rank_worker import RankReply, RankRequest
from equipoise.hal.conformance.executors.worker_pool import OnRankExit
from equipoise.hal.conformance.program import Case, case_to_json
from equipoise.hal.conformance.property import DeadlineLength, Property, Traits
from equipoise.hal.conformance.subject import compare_answers, to_violation
from equipoise.hal.errors import ClosingFailed, Violation

LOG = logging.getLogger(__name__)
GROUP_SIZES = (1, 2, 3, 4, 5, 8)
DEADLINES: Mapping[DeadlineLength, float] = {DeadlineLength.LONG: 15.0, DeadlineLength.SHORT: 1.0}
"""Seconds that an operation may last; the minimum for short deadlines."""
OPEN_TIMES_PER_DEADLINE = 10.0
"""A short deadline is this many times what opening a communicator takes: opening must be possible
within it, and some libraries need seconds for it."""
RETRY_DEADLINE_FACTORS = (3.0, 9.0)
"""The first case of a property that fails under a short deadline is replayed with one this many
times as long. If it then holds, the machine was busy, and may become busier: the next case that
fails is replayed with the next factor."""
TIME_INDEPENDENT_CLAUSES = ("C8", "R1")
"""Clauses that are not broken for want of time: a rank that does not answer had `WATCHDOG` seconds
more, and what is left over in the end is counted."""
MAX_DEADLINE_RATIO = 2.0
"""A fabric serves later cases too, unless its deadline is this many times longer than they need."""
WATCHDOG = 25.0
"""Seconds beyond the deadline that a rank may take to answer."""
LARGE_WATCHDOG = 120.0
"""The same where a case has the sizes of a real model: over a simulated device, four ranks on two
busy cores needed more than 40 s for hundreds of operations."""


@dataclass(frozen=True)
class GatherOptions:
    """How to wait for the replies to a request.

    Attributes:
        watchdog: seconds that a rank may take.
        expected_exits: ranks that are expected to end, and whose answers are not awaited.
        on_exit: called for every rank that ends.
    """

    watchdog: float
    expected_exits: frozenset[int]
    on_exit: OnRankExit


class RankStore(Protocol):
    """A store where ranks meet; a `RendezvousHost` is one."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port for `Rendezvous`."""
        ...

    def report_loss(self, rank: int, how: str) -> None:
        """Tell the ranks that `rank` is lost."""
        ...

    def close(self) -> None:
        """Stop the store and release its port."""
        ...


class DisposableStore(RankStore, Protocol):
    """A store that a case may end."""

    @property
    def pid(self) -> int:
        """The process that holds only this store."""
        ...


class RankGroup(Protocol):
    """The rank processes of a subject."""

    def open_store(self) -> RankStore:
        """Open a store where ranks can meet."""
        ...

    def open_disposable_store(self) -> DisposableStore:
        """Open a store that a case may end; one at a time. Raises `Unsupported`."""
        ...

    def request(
        self, orders: Mapping[int, RankRequest], call: GatherOptions
    ) -> dict[int, RankReply]:
        """Send requests and return the replies. Raises `Violation` when a rank ends or hangs."""
        ...

    def replace(self, ranks: Collection[int]) -> None:
        """Replace ranks that a case has ended."""
        ...

    def close(self) -> None:
        """Dismiss all ranks, within a bounded time."""
        ...


@dataclass(frozen=True)
class _OpenFabric:
    """A fabric that is open on `ranks`; it was opened on `size` ranks."""

    name: str
    store: RankStore
    size: int
    ranks: tuple[int, ...]
    deadline: float
    store_pid: int | None

    def gather_options(
        self, lost_ranks: Collection[int] = (), watchdog: float = WATCHDOG
    ) -> GatherOptions:
        return GatherOptions(
            self.deadline + watchdog, frozenset(lost_ranks), self.store.report_loss
        )

    def without(self, lost_ranks: Collection[int]) -> "_OpenFabric":
        return replace(self, ranks=tuple(rank for rank in self.ranks if rank not in lost_ranks))

    def open_request(self, rank: int) -> RankRequest:
        name, port = self.store.address
        where = Rendezvous(rank=rank, size=self.size, host=name, port=port, deadline=self.deadline)
        place = {"where": asdict(where), "holder": self.store_pid}
        return {"do": "open", "fabric": self.name, **place}


class MultiRankSubject:
    """Plays cases on the first ranks of a rank_group.

    A fabric is kept over the cases of one size and one deadline, and replaced after a violation.
    Each case of a property that breaks things has its own fabric, and no other is open then, so
    that the resources of the survivors can be measured afterwards (clause R1).

    Args:
        name: of the subject.
        traits: as declared; sizes up to the number of ranks.
        rank_group: the ranks; closed with the subject.
        deadlines: seconds that an operation may last, by length of the deadline.
    """

    def __init__(
        self,
        name: str,
        traits: Traits,
        rank_group: RankGroup,
        deadlines: Mapping[DeadlineLength, float],
    ) -> None:
        self._name = name
        self._traits = traits
        self._rank_group = rank_group
        self._deadlines = deadlines
        self._fabrics: dict[tuple[int, DeadlineLength], _OpenFabric] = {}
        self._open_time: tuple[str, float] = ("", 0.0)
        self._retries: Counter[str] = Counter()
        self._failed_properties: set[str] = set()
        self._open_measurements = 0
        self._fabrics_opened = 0
        self._cases_played = 0
        self._failed_close: str | None = None

    @property
    def name(self) -> str:
        """What is under test, and how."""
        return self._name

    @property
    def traits(self) -> Traits:
        """What properties may ask of it."""
        return self._traits

    def play(self, prop: Property, case: Case) -> str | None:
        """Play on the first `case.program.size` ranks. Raises `UsageError` without a reference.

        A communicator that fails to close is reported where everything else held.
        """
        reference = property_reference(prop)
        began = time.monotonic()
        replayed = False
        while True:
            self._failed_close = None
            try:
                reported = compare_answers(prop, case, self._play_case(prop, case, reference))
                break
            except Exception as error:
                self._close_fabrics_quietly()
                if not self._retry_with_longer_deadline(prop, error, replayed):
                    raise self._timed(to_violation(prop, error), began) from error
                replayed = True
        if self._failed_close is not None:
            raise self._timed(ClosingFailed(CLOSING, self._failed_close), began)
        return reported

    def _timed(self, violation: Violation, began: float) -> Violation:
        """The violation, which says whether its case has lasted for a long deadline."""
        lasted = time.monotonic() - began
        violation.expired = lasted >= self._deadlines[DeadlineLength.LONG]
        return violation

    def close(self) -> None:
        """End every rank, and every store."""
        self._close_fabrics_quietly()
        self._rank_group.close()

    def _play_case(self, prop: Property, case: Case, reference: str) -> list[Any]:
        """What all threads observed; None for those of lost ranks."""
        if prop.lost_ranks is None:
            stage = self._fabric_for(prop, case)
            replies = self._ask(
                prop, stage, self._play_request(case, stage, reference), frozenset()
            )
            tidy: RankRequest = {"do": "tidy"}
            tidied = self._request(dict.fromkeys(stage.ranks, tidy), stage.gather_options())
            answers_or_raise(CLOSING, tidied)
            return replies
        self._deadline_for(prop)  # measures on an open fabric, so before all are closed
        self._close_all_fabrics()
        stage, lost_ranks = self._fabric_for(prop, case), prop.lost_ranks(case.program)
        replies = self._ask(prop, stage, self._play_request(case, stage, reference), lost_ranks)
        self._close_fabric((stage.size, prop.deadline))
        survivors = stage.without(lost_ranks)
        orders: dict[int, RankRequest] = {rank: {"do": "rest"} for rank in survivors.ranks}
        answers_or_raise("R1", self._request(orders, survivors.gather_options()))
        return replies

    def _play_request(self, case: Case, stage: _OpenFabric, reference: str) -> RankRequest:
        self._cases_played += 1
        return {
            "do": "play",
            "fabric": stage.name,
            "property": reference,
            "case": case_to_json(case),
            "number": self._cases_played,
        }

    def _ask(
        self, prop: Property, stage: _OpenFabric, order: RankRequest, lost_ranks: frozenset[int]
    ) -> list[Any]:
        """What all threads observed; None for those of lost ranks."""
        watchdog = LARGE_WATCHDOG if prop.large else WATCHDOG
        replies = self._request(
            dict.fromkeys(stage.ranks, order), stage.gather_options(lost_ranks, watchdog)
        )
        if lost_ranks:
            self._rank_group.replace(lost_ranks)
            self._fabrics[stage.size, prop.deadline] = stage.without(lost_ranks)
        answers, absent = answers_or_raise(prop.clauses[0], replies), [None] * prop.threads
        return [answer for rank in range(stage.size) for answer in answers.get(rank, absent)]

    def _fabric_for(self, prop: Property, case: Case) -> _OpenFabric:
        """The fabric for that many ranks and that deadline; opened if there is none."""
        key = case.program.size, prop.deadline
        deadline = self._deadline_for(prop)
        if (
            key in self._fabrics
            and not deadline <= self._fabrics[key].deadline <= MAX_DEADLINE_RATIO * deadline
        ):
            self._close_fabric(key)
        if key not in self._fabrics:
            host, holder = self._open_store(prop)
            self._open_fabric(prop, key, deadline, host, holder)
        return self._fabrics[key]

    def _open_fabric(
        self,
        prop: Property,
        key: tuple[int, DeadlineLength],
        deadline: float,
        host: RankStore,
        holder: int | None,
    ) -> _OpenFabric:
        """Open a fabric on the first ranks."""
        size, _ = key
        self._fabrics_opened += 1
        stage = _OpenFabric(
            f"fabric{self._fabrics_opened}", host, size, tuple(range(size)), deadline, holder
        )
        self._fabrics[key] = stage
        replies = self._request(
            {rank: stage.open_request(rank) for rank in stage.ranks}, stage.gather_options()
        )
        answers_or_raise(prop.clauses[0], replies)
        return stage

    def _deadline_for(self, prop: Property) -> float:
        """Seconds of deadline of a fabric for that property."""
        deadline = self._deadlines[prop.deadline]
        if prop.deadline is not DeadlineLength.SHORT:
            return deadline
        retries = self._retries[prop.name]
        keeps = retries > 0 and prop.name not in self._failed_properties
        stretch = RETRY_DEADLINE_FACTORS[retries - 1] if keeps else 1.0
        return stretch * max(deadline, OPEN_TIMES_PER_DEADLINE * self._slowest_open_time(prop))

    def _retry_with_longer_deadline(self, prop: Property, error: Exception, replayed: bool) -> bool:
        """Whether a case that failed is played again, with a longer deadline.

        On a busy machine an operation that would have ended well may miss a short deadline. Once
        for each factor: a failure for another reason shows again, in this case or in a later one.
        """
        if prop.deadline is not DeadlineLength.SHORT or prop.name in self._failed_properties:
            return False
        if isinstance(error, Violation) and error.clause in TIME_INDEPENDENT_CLAUSES:
            return False
        if replayed or self._retries[prop.name] == len(RETRY_DEADLINE_FACTORS):
            # Shrinking plays many failing cases, which need not wait that long.
            self._failed_properties.add(prop.name)
            return False
        self._retries[prop.name] += 1
        self._open_time = ("", 0.0)
        LOG.warning(
            "%s: a case failed under a brisk deadline and is played again with one %g times as "
            "long, in case the machine was only too busy: %s",
            prop.name,
            RETRY_DEADLINE_FACTORS[self._retries[prop.name] - 1],
            " ".join(str(error).split()),
        )
        return True

    def _slowest_open_time(self, prop: Property) -> float:
        """Seconds that the slowest of all ranks needs to open a communicator.

        Measured again for each property: the machine may be busier than before.
        """
        if self._open_time[0] != prop.name:
            key = max(self._traits.group_sizes), DeadlineLength.LONG
            stage, fresh = self._fabrics.get(key), key not in self._fabrics
            if stage is None:
                deadline = self._deadlines[DeadlineLength.LONG]
                stage = self._open_fabric(prop, key, deadline, self._rank_group.open_store(), None)
            self._open_measurements += 1
            order = {"do": "gauge", "fabric": stage.name, "number": self._open_measurements}
            replies = self._request(dict.fromkeys(stage.ranks, order), stage.gather_options())
            answers = answers_or_raise(prop.clauses[0], replies)
            if fresh:
                self._close_fabric(key)
            self._open_time = prop.name, max(float(seconds) for (seconds,) in answers.values())
        return self._open_time[1]

    def _open_store(self, prop: Property) -> tuple[RankStore, int | None]:
        """A store for the ranks, and the id of its process if it may be ended."""
        if not prop.ends_store:
            return self._rank_group.open_store(), None
        expendable = self._rank_group.open_disposable_store()
        return expendable, expendable.pid

    def _close_fabrics_quietly(self) -> None:
        """Close all fabrics; errors now are consequences of the one being reported."""
        while self._fabrics:
            with suppress(Violation):
                self._close_fabric(next(iter(self._fabrics)))

    def _close_all_fabrics(self) -> None:
        for key in list(self._fabrics):
            self._close_fabric(key)

    def _close_fabric(self, key: tuple[int, DeadlineLength]) -> None:
        """Close a fabric on every rank where it is open; notes what fails to close."""
        stage = self._fabrics.pop(key)
        try:
            order = {"do": "close", "fabric": stage.name}
            answers_or_raise(
                CLOSING, self._request(dict.fromkeys(stage.ranks, order), stage.gather_options())
            )
        except Violation as violation:
            if violation.clause != CLOSING:
                raise
            self._note_failed_close(str(violation).removeprefix(f"{CLOSING}: "))
        finally:
            stage.store.close()

    def _request(
        self, orders: Mapping[int, RankRequest], call: GatherOptions
    ) -> dict[int, RankReply]:
        try:
            replies = self._rank_group.request(orders, call)
        except Violation:  # the ranks have ended, and their fabrics with them
            while self._fabrics:
                self._fabrics.popitem()[1].store.close()
            raise
        for rank, reply in sorted(replies.items()):
            if "unclosed" in reply:
                self._note_failed_close(f"rank {rank}: {reply['unclosed']}")
        return replies

    def _note_failed_close(self, what: str) -> None:
        self._failed_close = self._failed_close or what


def answers_or_raise(clause: str, replies: Mapping[int, RankReply]) -> dict[int, list[Any]]:
    """What each rank observed. Raises the worst fault, of `clause` if the fault names none."""
    faults = sorted(
        (rating, rank, fault_clause or clause, text)
        for rank, reply in replies.items()
        if "fault" in reply
        for rating, fault_clause, text in [reply["fault"]]
    )
    for _, rank, violated_clause, text in faults:
        # A property that compares ranks names the rank itself.
        who = "" if re.match(rf"rank {rank}\b", text) else f"rank {rank}: "
        raise Violation(violated_clause, f"{who}{text}")
    return {rank: reply["answers"] for rank, reply in replies.items()}
