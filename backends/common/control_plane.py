"""The control plane over torch.distributed's TCP store.

Each rank has two connections: a blocking wait holds the lock of its connection, and the heartbeat
must not stop while the engine waits for a ballot.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from equipoise.backends.common.bounded_wait import BoundedCalls
from equipoise.backends.common.tcp_store import (
    LOST_RANK_KEY,
    as_text,
    connect_store,
    hold,
    report_lost_rank,
    short_message,
    wait_for_listener,
)
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import BallotIncomplete, ControlPlaneLost, RankLost
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

T = TypeVar("T")
HEARTBEAT_INTERVAL = 0.25
"""Seconds between heartbeats: a write to the store per rank, eight of which fit into the
timeout."""
HEARTBEAT_TIMEOUT = 2.0
"""Seconds without a heartbeat after which a rank counts as lost. A garbage collection or a starved
processor takes tenths of a second."""
MIN_POLL = 0.001
MAX_POLL = 0.02
"""Seconds between two polls for ballots, at least and at most."""
POLL_BACKOFF = 0.125
"""A pause is this fraction of the time waited so far, so that no wait is longer than needed by more
than that. With pauses that double, a ballot that arrives after 8 ms is seen after 15 ms, which
matters to steps of 12 ms."""
NO_BALLOT = "~"
"""A value that is no ballot: ballots are hexadecimal digits or a dash."""
STORE_TIMEOUT = 2.0
"""Seconds that the store may take to answer a request that does not wait for another rank."""


class StoreControlPlane:
    """Ballots, decisions and heartbeats of one rank."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._where = rendezvous
        if rendezvous.hosts_store:
            hold(rendezvous)
        wait_for_listener(rendezvous)
        self._calls = BoundedCalls(f"the store at {rendezvous.host}:{rendezvous.port}")
        self._store = self.call_store(lambda: connect_store(rendezvous))
        self._current = _CurrentOperation("start-up")
        self._heartbeat = self.call_store(lambda: _Heartbeat(rendezvous, self._current))

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
        return self._current.operation

    def call_store(self, call: Callable[[], T], seconds: float | None = None) -> T:
        """`call` on the store, given up after `seconds` (the deadline) with `ControlPlaneLost`."""
        limit = self._where.deadline if seconds is None else seconds
        return self._calls.call(call, limit)

    def cast(self, question: str, ballot: bytes) -> None:
        """Put this rank's ballot; a second one on the same question is an error."""
        key = _ballot(question, self.rank)
        try:
            stored_ballot = self.call_store(
                lambda: self._store.compare_set(key, "", _encode(ballot))
            )
        except DistError as error:
            raise ControlPlaneLost(
                f"ballot {question!r} was not taken: {short_message(error)}"
            ) from error
        if _decode(as_text(stored_ballot)) != ballot:
            raise ControlPlaneLost(f"ballot {question!r} was cast twice, differently")

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
        read_ballots: Callable[[list[str]], list[bytes | str] | None],
    ) -> tuple[bytes, ...]:
        keys = [_ballot(question, rank) for rank in members]
        began = time.monotonic()
        while True:
            elapsed = time.monotonic() - began
            remaining = max(timeout - elapsed, 0.0)
            try:
                ballots = read_ballots(keys)
            except DistError as error:
                raise ControlPlaneLost(
                    f"ballots on {question!r} unreadable: {short_message(error)}"
                ) from error
            except ControlPlaneLost:
                # The store is late: a busy machine may need more than STORE_TIMEOUT. Reading again
                # does no harm, so the caller's timeout ends it, or the deadline of every wait for
                # the store (clause C6).
                longest = min(timeout, self._where.deadline)
                if self._calls.closed or time.monotonic() - began >= longest:
                    raise
                ballots = None
            if ballots is not None:
                return tuple(_decode(as_text(value)) for value in ballots)
            if remaining == 0.0:
                raise BallotIncomplete(question, self._absent(question, members))
            time.sleep(min(max(MIN_POLL, POLL_BACKOFF * elapsed), MAX_POLL, remaining))

    def decide(self, question: str, value: bytes) -> bytes:
        """Settle a question; the first value wins."""
        try:
            key = _decision(question)
            winning_value = self.call_store(
                lambda: self._store.compare_set(key, "", _encode(value))
            )
        except DistError as error:
            raise ControlPlaneLost(
                f"outcome of {question!r} unknown: {short_message(error)}"
            ) from error
        return _decode(as_text(winning_value))

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        """Let go of ballots and of the decision."""
        members = range(self.size) if ranks is None else ranks
        keys = [_decision(question), *(_ballot(question, rank) for rank in members)]
        try:
            self.call_store(lambda: [self._store.delete_key(key) for key in keys])
        except DistError as error:
            raise ControlPlaneLost(
                f"{question!r} was not forgotten: {short_message(error)}"
            ) from error

    def forget_together(self, question: str, ranks: Sequence[int]) -> None:
        """This rank has read the ballots; the last of these ranks to say so lets go of them.

        For ballots that every member reads when it likes: none may delete its own before that.
        """
        counter_key = f"read/{question}"
        try:
            readers = self.call_store(lambda: self._store.add(counter_key, 1))
            if readers == len(ranks):
                self.forget(question, ranks)
                self.call_store(lambda: self._store.delete_key(counter_key))
        except DistError as error:
            raise ControlPlaneLost(
                f"{question!r} was not forgotten: {short_message(error)}"
            ) from error

    def set_operation(self, operation: str) -> None:
        """Say what this rank is doing."""
        self._current.operation = operation

    def announce_exit(self, reason: str) -> None:
        """Say that this rank ends."""
        try:
            self.call_store(lambda: report_lost_rank(self._store, self.rank, reason), STORE_TIMEOUT)
        except (DistError, ControlPlaneLost):
            return  # without a store there is no rank to tell

    def lost_rank(self, timeout: float) -> RankLost | None:
        """Which rank was lost, waiting for evidence."""
        expiry = time.monotonic() + timeout
        while True:
            loss = self._reported_loss() or self._silent_rank()
            if loss is not None or time.monotonic() >= expiry:
                return loss
            time.sleep(HEARTBEAT_INTERVAL / 5)

    def close(self) -> None:
        """Stop the heartbeat, and the thread that asks the store."""
        self._heartbeat.stop()
        self._calls.close()

    def _reported_loss(self) -> RankLost | None:
        try:
            if not self.call_store(lambda: self._store.check([LOST_RANK_KEY]), STORE_TIMEOUT):
                return None
            loss = json.loads(
                as_text(self.call_store(lambda: self._store.get(LOST_RANK_KEY), STORE_TIMEOUT))
            )
        except (DistError, ControlPlaneLost):
            return None
        if loss["rank"] == self.rank:
            return None
        return RankLost(loss["rank"], loss["how"], self._current.operation)

    def _silent_rank(self) -> RankLost | None:
        silent = self._heartbeat.most_silent()
        if silent is None:
            return None
        rank, seconds = silent
        return RankLost(rank, f"fell silent {seconds:.0f} s ago", self._current.operation)

    def _read(self, keys: list[str]) -> list[bytes | str] | None:
        """All of `keys`, or None when one is missing.

        Polls instead of the store's own `wait`. That holds the connection, and another thread of
        this rank may have to cast the ballot that a peer waits for before it casts its own. And
        torch logs two lines at each time-out.
        """

        def read_if_present() -> list[bytes | str] | None:
            return list(self._store.multi_get(keys)) if self._store.check(keys) else None

        return self.call_store(read_if_present, STORE_TIMEOUT)

    def _peek(self, keys: list[str]) -> list[bytes | str] | None:
        """As `_read`; never waits, not even for a key that is deleted in between."""
        if not self.call_store(lambda: self._store.check(keys), STORE_TIMEOUT):
            return None
        values: list[bytes | str] = []
        for key in keys:
            # Without such a key the store answers with what was expected, and sets nothing.
            value = self.call_store(
                partial(self._store.compare_set, key, NO_BALLOT, NO_BALLOT), STORE_TIMEOUT
            )
            if as_text(value) == NO_BALLOT:
                return None
            values.append(value)
        return values

    def _absent(self, question: str, members: tuple[int, ...]) -> tuple[int, ...]:

        def absent() -> tuple[int, ...]:
            return tuple(r for r in members if not self._store.check([_ballot(question, r)]))

        try:
            return self.call_store(absent, STORE_TIMEOUT)
        except DistError as error:
            raise ControlPlaneLost(
                f"ballots on {question!r} unreadable: {short_message(error)}"
            ) from error


@dataclass
class _CurrentOperation:
    """What a rank is doing: set by the control plane, published by the heartbeat.

    An object of its own: a heartbeat that referred to its control plane would keep it, and its
    connections, until the garbage collector runs.
    """

    operation: str


class _Heartbeat:
    """Publishes this rank's heartbeat, and notes when each other rank's heartbeat last changed."""

    def __init__(self, rendezvous: Rendezvous, doing: _CurrentOperation) -> None:
        self._where = rendezvous
        self._current = doing
        self._store = connect_store(rendezvous)
        self._last_check = time.monotonic()
        self._last_beats = [("", self._last_check)] * rendezvous.size
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="equipoise.heartbeat", daemon=True)
        self._thread.start()

    def most_silent(self) -> tuple[int, float] | None:
        """The rank that is silent for longest, and for how many seconds; None if none is.

        Silence counts up to this rank's own last poll, so that a rank which was itself stopped or
        starved reports no other; a rank that has not started yet has the whole deadline.
        """
        silences = [
            (self._last_check - since, rank) for rank, (_, since) in enumerate(self._last_beats)
        ]
        deadline = [
            HEARTBEAT_TIMEOUT if beat else self._where.deadline for beat, _ in self._last_beats
        ]
        silent = [
            (seconds, rank)
            for seconds, rank in silences
            if rank != self._where.rank and seconds >= deadline[rank]
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
                with NATIVE_CALL_GUARD:
                    self._beat(count)
            except DistError:
                return  # the launcher is gone: every other call to the store says so itself
            if self._stop.wait(HEARTBEAT_INTERVAL):
                return

    def _beat(self, count: int) -> None:
        self._store.set(f"beat/{self._where.rank}", f"{count} {self._current.operation}")
        now = time.monotonic()
        for rank in range(self._where.size):
            key = f"beat/{rank}"
            value = as_text(self._store.get(key)) if self._store.check([key]) else ""
            if value != self._last_beats[rank][0]:
                self._last_beats[rank] = (value, now)
        self._last_check = now


def _ballot(question: str, rank: int) -> str:
    return f"ballot/{question}/{rank}"


def _decision(question: str) -> str:
    return f"decision/{question}"


def _encode(value: bytes) -> str:
    """Never empty: to the store an empty value is one that is not there."""
    return value.hex() or "-"


def _decode(text: str) -> bytes:
    return b"" if text == "-" else bytes.fromhex(text)
