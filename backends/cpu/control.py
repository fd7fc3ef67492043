"""The control plane over torch.distributed's TCP store.

Two connections a rank: a blocking wait holds a connection's lock, and the heartbeat must not stop
beating while the engine waits for a ballot.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from equipoise.backends.cpu.bounded import BoundedCalls
from equipoise.backends.cpu.store import (
    GONE,
    await_listener,
    connect,
    hold,
    line,
    tell_gone,
    text,
)
from equipoise.hal.abroad import ABROAD
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import BallotIncomplete, ControlLost, RankLost

T = TypeVar("T")
BEAT = 0.25
"""Seconds between heartbeats."""
SILENCE = 2.0
"""Seconds without a heartbeat after which a rank counts as silent."""
SOONEST = 0.001
LATEST = 0.02
"""Seconds between two looks at ballots, at least and at most."""
LONGER = 0.125
"""A pause is this part of what was waited so far: so nobody waits much longer than it has to. A
pause that doubles makes a vote that came after 8 ms be seen after 15, which steps of 12 ms feel."""
ABSENT = "~"
"""No ballot: those are hexadecimal digits, or a dash."""
ANSWER = 2.0
"""Seconds that the store may take over a question that it need not wait to answer."""


class StoreControlPlane:
    """Ballots, decisions and heartbeats of one rank."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._where = rendezvous
        if rendezvous.hosts_store:
            hold(rendezvous)
        await_listener(rendezvous)
        self._calls = BoundedCalls(f"the store at {rendezvous.host}:{rendezvous.port}")
        self._store = self.bounded(lambda: connect(rendezvous))
        self._doing = _Doing("start-up")
        self._pulse = self.bounded(lambda: _Pulse(rendezvous, self._doing))

    @property
    def rank(self) -> int:
        """This rank."""
        return self._where.rank

    @property
    def size(self) -> int:
        """How many ranks."""
        return self._where.size

    @property
    def store(self) -> Store:
        """The store that communicators meet over."""
        return self._store

    @property
    def operation(self) -> str:
        """What this rank is doing."""
        return self._doing.operation

    def bounded(self, call: Callable[[], T], seconds: float | None = None) -> T:
        """`call` on the store, given up after `seconds` (the deadline) with `ControlLost`."""
        limit = self._where.deadline if seconds is None else seconds
        return self._calls.call(call, limit)

    def cast(self, question: str, ballot: bytes) -> None:
        """Put this rank's ballot; a second one on the same question is an error."""
        mine = _ballot(question, self.rank)
        try:
            kept = self.bounded(lambda: self._store.compare_set(mine, "", _encode(ballot)))
        except DistError as error:
            raise ControlLost(f"ballot {question!r} was not taken: {line(error)}") from error
        if _decode(text(kept)) != ballot:
            raise ControlLost(f"ballot {question!r} was cast twice, differently")

    def collect(
        self, question: str, timeout: float, ranks: Sequence[int] | None = None
    ) -> tuple[bytes, ...]:
        """The ballots of these ranks, in that order."""
        members = tuple(range(self.size) if ranks is None else ranks)
        return self._collect(question, timeout, members, self._read)

    def collect_retractable(
        self, question: str, timeout: float, ranks: Sequence[int]
    ) -> tuple[bytes, ...]:
        """As `collect`, where a rank may take its ballot back (`forget`) meanwhile.

        A question to the store for each ballot: the one for all of them waits, for up to the
        deadline, for one that has just gone, and holds the connection.
        """
        return self._collect(question, timeout, tuple(ranks), self._peek)

    def _collect(
        self,
        question: str,
        timeout: float,
        members: tuple[int, ...],
        read: Callable[[list[str]], list[bytes | str] | None],
    ) -> tuple[bytes, ...]:
        keys = [_ballot(question, rank) for rank in members]
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            left = max(timeout - waited, 0.0)
            try:
                found = read(keys)
            except DistError as error:
                raise ControlLost(f"ballots on {question!r} unreadable: {line(error)}") from error
            if found is not None:
                return tuple(_decode(text(value)) for value in found)
            if left == 0.0:
                raise BallotIncomplete(question, self._absent(question, members))
            time.sleep(min(max(SOONEST, LONGER * waited), LATEST, left))

    def decide(self, question: str, value: bytes) -> bytes:
        """Settle a question; the first value wins."""
        try:
            key = _decision(question)
            won = self.bounded(lambda: self._store.compare_set(key, "", _encode(value)))
        except DistError as error:
            raise ControlLost(f"outcome of {question!r} unknown: {line(error)}") from error
        return _decode(text(won))

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        """Let go of ballots and of the decision."""
        members = range(self.size) if ranks is None else ranks
        keys = [_decision(question), *(_ballot(question, rank) for rank in members)]
        try:
            self.bounded(lambda: [self._store.delete_key(key) for key in keys])
        except DistError as error:
            raise ControlLost(f"{question!r} was not forgotten: {line(error)}") from error

    def forget_together(self, question: str, ranks: Sequence[int]) -> None:
        """This rank has read the ballots; the last of these ranks to say so lets go of them.

        For ballots that every member reads when it likes: none may delete its own before that.
        """
        counted = f"read/{question}"
        try:
            readers = self.bounded(lambda: self._store.add(counted, 1))
            if readers == len(ranks):
                self.forget(question, ranks)
                self.bounded(lambda: self._store.delete_key(counted))
        except DistError as error:
            raise ControlLost(f"{question!r} was not forgotten: {line(error)}") from error

    def enter(self, operation: str) -> None:
        """Say what this rank is doing."""
        self._doing.operation = operation

    def leave(self, reason: str) -> None:
        """Say that this rank ends."""
        try:
            self.bounded(lambda: tell_gone(self._store, self.rank, reason), ANSWER)
        except (DistError, ControlLost):
            return  # nobody left to tell

    def lost(self, timeout: float) -> RankLost | None:
        """Which rank was lost, waiting for evidence."""
        expiry = time.monotonic() + timeout
        while True:
            found = self._told() or self._silent()
            if found is not None or time.monotonic() >= expiry:
                return found
            time.sleep(BEAT / 5)

    def close(self) -> None:
        """Stop the heartbeat, and the thread that asks the store."""
        self._pulse.stop()
        self._calls.close()

    def _told(self) -> RankLost | None:
        try:
            if not self.bounded(lambda: self._store.check([GONE]), ANSWER):
                return None
            loss = json.loads(text(self.bounded(lambda: self._store.get(GONE), ANSWER)))
        except (DistError, ControlLost):
            return None
        if loss["rank"] == self.rank:
            return None
        return RankLost(loss["rank"], loss["how"], self._doing.operation)

    def _silent(self) -> RankLost | None:
        silent = self._pulse.most_silent()
        if silent is None:
            return None
        rank, seconds = silent
        return RankLost(rank, f"fell silent {seconds:.0f} s ago", self._doing.operation)

    def _read(self, keys: list[str]) -> list[bytes | str] | None:
        """All of `keys`, or None when one is missing.

        A look, not the store's own `wait`: that one holds the connection, though another thread of
        this rank may have to cast the ballot for which a peer waits before it casts its own; and
        torch logs two lines each time that it passes its time-out.
        """

        def found() -> list[bytes | str] | None:
            return list(self._store.multi_get(keys)) if self._store.check(keys) else None

        return self.bounded(found, ANSWER)

    def _peek(self, keys: list[str]) -> list[bytes | str] | None:
        """As `_read`; never waits, not even for a key that is deleted in between."""
        if not self.bounded(lambda: self._store.check(keys), ANSWER):
            return None
        found: list[bytes | str] = []
        for key in keys:
            # Without such a key the store answers with what was expected, and sets nothing.
            value = self.bounded(partial(self._store.compare_set, key, ABSENT, ABSENT), ANSWER)
            if text(value) == ABSENT:
                return None
            found.append(value)
        return found

    def _absent(self, question: str, members: tuple[int, ...]) -> tuple[int, ...]:

        def absent() -> tuple[int, ...]:
            return tuple(r for r in members if not self._store.check([_ballot(question, r)]))

        try:
            return self.bounded(absent, ANSWER)
        except DistError as error:
            raise ControlLost(f"ballots on {question!r} unreadable: {line(error)}") from error


@dataclass
class _Doing:
    """What a rank is doing: its plane says so, its pulse tells the others.

    A thing of its own, since a pulse that knew its plane would keep it, and its connections, until
    the garbage collector comes by.
    """

    operation: str


class _Pulse:
    """Beats for its own rank, and watches when each other rank last did."""

    def __init__(self, rendezvous: Rendezvous, doing: _Doing) -> None:
        self._where = rendezvous
        self._doing = doing
        self._store = connect(rendezvous)
        self._looked = time.monotonic()
        self._seen = [("", self._looked)] * rendezvous.size
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="equipoise.pulse", daemon=True)
        self._thread.start()

    def most_silent(self) -> tuple[int, float] | None:
        """The rank that is silent for longest, and for how many seconds; None if none is.

        Silence counts up to this rank's own last look, so that a rank which was itself stopped or
        starved accuses nobody; a rank that has not come yet has the whole deadline to come.
        """
        silences = [(self._looked - since, rank) for rank, (_, since) in enumerate(self._seen)]
        patience = [SILENCE if beat else self._where.deadline for beat, _ in self._seen]
        silent = [
            (seconds, rank)
            for seconds, rank in silences
            if rank != self._where.rank and seconds >= patience[rank]
        ]
        if not silent:
            return None
        seconds, rank = max(silent)
        return rank, seconds

    def stop(self) -> None:
        """End the thread; bounded."""
        self._stop.set()
        self._thread.join(self._where.deadline)

    def _run(self) -> None:
        count = 0
        while True:
            count += 1
            try:
                with ABROAD:
                    self._beat(count)
            except DistError:
                return  # the launcher is gone: every other call to the store says so itself
            if self._stop.wait(BEAT):
                return

    def _beat(self, count: int) -> None:
        self._store.set(f"beat/{self._where.rank}", f"{count} {self._doing.operation}")
        now = time.monotonic()
        for rank in range(self._where.size):
            key = f"beat/{rank}"
            value = text(self._store.get(key)) if self._store.check([key]) else ""
            if value != self._seen[rank][0]:
                self._seen[rank] = (value, now)
        self._looked = now


def _ballot(question: str, rank: int) -> str:
    return f"ballot/{question}/{rank}"


def _decision(question: str) -> str:
    return f"decision/{question}"


def _encode(value: bytes) -> str:
    """Never empty: to the store an empty value is one that is not there."""
    return value.hex() or "-"


def _decode(text: str) -> bytes:
    return b"" if text == "-" else bytes.fromhex(text)
