"""The control plane over torch.distributed's TCP store.

Two connections a rank: a blocking wait holds a connection's lock, and the heartbeat must not stop
beating while the engine waits for a ballot.
"""

import json
import threading
import time
from datetime import timedelta

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import BallotIncomplete, ControlLost, RankLost

BEAT = 0.25
"""Seconds between heartbeats."""
SILENCE = 2.0
"""Seconds without a heartbeat after which a rank counts as silent."""
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


class StoreHost:
    """The store itself, on a free port of the loopback interface."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    @property
    def address(self) -> tuple[str, int]:
        """Where the ranks find it."""
        return "127.0.0.1", self._store.port

    def report_loss(self, rank: int, how: str) -> None:
        """Tell the ranks who is gone."""
        tell_gone(self._store, rank, how)

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
        self._store = connect(rendezvous)
        self._operation = "start-up"
        self._pulse = _Pulse(rendezvous, self)

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

    def cast(self, question: str, ballot: bytes) -> None:
        """Put this rank's ballot; a second one on the same question is an error."""
        mine = _ballot(question, self.rank)
        try:
            kept = self._store.compare_set(mine, "", _encode(ballot))
        except DistError as error:
            raise ControlLost(f"ballot {question!r} was not taken: {_line(error)}") from error
        if _decode(_text(kept)) != ballot:
            raise ControlLost(f"ballot {question!r} was cast twice, differently")

    def collect(self, question: str, timeout: float) -> tuple[bytes, ...]:
        """All ranks' ballots, by rank."""
        keys = [_ballot(question, rank) for rank in range(self.size)]
        try:
            self._store.wait(keys, timedelta(seconds=timeout))
            found = self._store.multi_get(keys)
        except DistError as error:
            raise self._incomplete(question, keys, error) from error
        return tuple(_decode(_text(value)) for value in found)

    def decide(self, question: str, value: bytes) -> bytes:
        """Settle a question; the first value wins."""
        try:
            won = self._store.compare_set(f"decision/{question}", "", _encode(value))
        except DistError as error:
            raise ControlLost(f"outcome of {question!r} unknown: {_line(error)}") from error
        return _decode(_text(won))

    def enter(self, operation: str) -> None:
        """Say what this rank is doing."""
        self._operation = operation

    def leave(self, reason: str) -> None:
        """Say that this rank ends."""
        try:
            tell_gone(self._store, self.rank, reason)
        except DistError:
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
            if not self._store.check([GONE]):
                return None
            loss = json.loads(_text(self._store.get(GONE)))
        except DistError:
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
        try:
            missing = tuple(r for r, key in enumerate(keys) if not self._store.check([key]))
        except DistError:
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
