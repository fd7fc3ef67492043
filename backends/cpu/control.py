"""The control plane over torch.distributed's TCP store.

Two connections a rank: a blocking wait holds a connection's lock, and the heartbeat must not stop
beating while the engine waits for a ballot.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

from equipoise.backends.cpu.bounded import BoundedCalls
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import BallotIncomplete, ControlLost, RankLost

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
BACKLOG = 1024
"""Connections that may wait to be accepted: two a rank."""
START = 30.0
"""Seconds for the store to come up."""
RETRY = 0.05
"""Seconds between two attempts to reach the store."""
BEAT = 0.25
"""Seconds between heartbeats."""
SILENCE = 2.0
"""Seconds without a heartbeat after which a rank counts as silent."""
ANSWER = 2.0
"""Seconds that the store may take over a question that it need not wait to answer."""
GONE = "gone"
"""The key under which the first loss of a rank is told: JSON {"rank": int, "how": str}."""


def connect(rendezvous: Rendezvous) -> TCPStore:
    """A connection to the store. Raises `ControlLost`."""
    try:
        return TCPStore(
            rendezvous.host,
            rendezvous.port,
            None,
            False,
            timedelta(seconds=rendezvous.deadline),
            wait_for_workers=False,
        )
    except DistError as error:
        where = f"{rendezvous.host}:{rendezvous.port}"
        raise ControlLost(f"no store answers at {where}: {_line(error)}") from error


def await_listener(rendezvous: Rendezvous) -> None:
    """Wait until somebody listens where the store should be.

    torch's own attempts overshoot their time-out by as much again, and log a page of frames.
    Raises `ControlLost`.
    """
    where, expiry = (rendezvous.host, rendezvous.port), time.monotonic() + rendezvous.deadline
    while True:
        try:
            socket.create_connection(where, timeout=rendezvous.deadline).close()
            return
        except OSError as error:
            if time.monotonic() >= expiry:
                where_text = f"{rendezvous.host}:{rendezvous.port}"
                raise ControlLost(f"no store answers at {where_text}: {_line(error)}") from error
        time.sleep(RETRY)


class StoreHost:
    """The store itself, on a free port of the loopback interface and on no other.

    Raises:
        ControlLost: this machine has no usable loopback interface.
    """

    def __init__(self) -> None:
        try:
            with socket.socket() as listener:
                listener.bind((LOOPBACK, 0))
                listener.listen(BACKLOG)
                self._port: int = listener.getsockname()[1]
                self._store = TCPStore(
                    LOOPBACK,
                    self._port,
                    None,
                    True,
                    timedelta(seconds=START),
                    wait_for_workers=False,
                    master_listen_fd=listener.fileno(),
                )
                listener.detach()  # the store owns it now
        except (OSError, DistError) as error:
            raise ControlLost(f"no store can be held on {LOOPBACK}: {_line(error)}") from error

    @property
    def address(self) -> tuple[str, int]:
        """Where the ranks find it."""
        return LOOPBACK, self._port

    def report_loss(self, rank: int, how: str) -> None:
        """Tell the ranks who is gone."""
        tell_gone(self._store, rank, how)

    def beat(self, rank: int) -> tuple[int, str]:
        """How many times `rank` has beaten, and what it was doing then; (0, "start-up") before."""
        key = f"beat/{rank}"
        if not self._store.check([key]):
            return 0, "start-up"
        count, _, operation = _text(self._store.get(key)).partition(" ")
        return int(count), operation

    def close(self) -> None:
        """Let go of the store; its port closes with it."""
        del self._store


def tell_gone(store: Store, rank: int, how: str) -> None:
    """Say that `rank` is gone; only the first loss of a run is kept, later ones follow from it."""
    store.compare_set(GONE, "", json.dumps({"rank": rank, "how": how}))


class StoreControlPlane:
    """Ballots, decisions and heartbeats of one rank."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._where = rendezvous
        await_listener(rendezvous)
        self._calls = BoundedCalls(f"the store at {rendezvous.host}:{rendezvous.port}")
        self._store = self.bounded(lambda: connect(rendezvous))
        self._operation = "start-up"
        self._pulse = self.bounded(lambda: _Pulse(rendezvous, self))

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
        return self._operation

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
            raise ControlLost(f"ballot {question!r} was not taken: {_line(error)}") from error
        if _decode(_text(kept)) != ballot:
            raise ControlLost(f"ballot {question!r} was cast twice, differently")

    def collect(self, question: str, timeout: float) -> tuple[bytes, ...]:
        """All ranks' ballots, by rank."""
        keys = [_ballot(question, rank) for rank in range(self.size)]

        def read() -> list[bytes]:
            self._store.wait(keys, timedelta(seconds=timeout))
            found: list[bytes] = self._store.multi_get(keys)
            return found

        try:
            found = self.bounded(read, timeout + ANSWER)
        except DistError as error:
            raise self._incomplete(question, keys, error) from error
        return tuple(_decode(_text(value)) for value in found)

    def decide(self, question: str, value: bytes) -> bytes:
        """Settle a question; the first value wins."""
        try:
            key = f"decision/{question}"
            won = self.bounded(lambda: self._store.compare_set(key, "", _encode(value)))
        except DistError as error:
            raise ControlLost(f"outcome of {question!r} unknown: {_line(error)}") from error
        return _decode(_text(won))

    def enter(self, operation: str) -> None:
        """Say what this rank is doing."""
        self._operation = operation

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
        """Stop the heartbeat."""
        self._pulse.stop()

    def _told(self) -> RankLost | None:
        try:
            if not self.bounded(lambda: self._store.check([GONE]), ANSWER):
                return None
            loss = json.loads(_text(self.bounded(lambda: self._store.get(GONE), ANSWER)))
        except (DistError, ControlLost):
            return None
        if loss["rank"] == self.rank:
            return None
        return RankLost(loss["rank"], loss["how"], self._operation)

    def _silent(self) -> RankLost | None:
        silent = self._pulse.most_silent()
        if silent is None:
            return None
        rank, seconds = silent
        return RankLost(rank, f"fell silent {seconds:.0f} s ago", self._operation)

    def _incomplete(self, question: str, keys: list[str], error: DistError) -> Exception:

        def absent() -> tuple[int, ...]:
            return tuple(r for r, key in enumerate(keys) if not self._store.check([key]))

        try:
            missing = self.bounded(absent, ANSWER)
        except (DistError, ControlLost):
            return ControlLost(f"ballots on {question!r} unreadable: {_line(error)}")
        return BallotIncomplete(question, missing)


class _Pulse:
    """Beats for its own rank, and watches when each other rank last did."""

    def __init__(self, rendezvous: Rendezvous, plane: StoreControlPlane) -> None:
        self._where = rendezvous
        self._plane = plane
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
                self._beat(count)
            except DistError:
                return  # the launcher is gone: every other call to the store says so itself
            if self._stop.wait(BEAT):
                return

    def _beat(self, count: int) -> None:
        self._store.set(f"beat/{self._where.rank}", f"{count} {self._plane.operation}")
        now = time.monotonic()
        for rank in range(self._where.size):
            key = f"beat/{rank}"
            value = _text(self._store.get(key)) if self._store.check([key]) else ""
            if value != self._seen[rank][0]:
                self._seen[rank] = (value, now)
        self._looked = now


def _ballot(question: str, rank: int) -> str:
    return f"ballot/{question}/{rank}"


def _encode(value: bytes) -> str:
    """Never empty: to the store an empty value is one that is not there."""
    return value.hex() or "-"


def _decode(text: str) -> bytes:
    return b"" if text == "-" else bytes.fromhex(text)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _line(error: Exception) -> str:
    return str(error).splitlines()[0][:160]
