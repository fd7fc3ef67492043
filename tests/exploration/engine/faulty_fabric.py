"""What stands between an engine and its world, so that a fault can strike just there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from exploration.engine.case import FaultKind
from exploration.engine.lane import Planted
from torch import Tensor

from equipoise.hal.communicator import Communicator, Exchange
from equipoise.hal.errors import ControlPlaneLost
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work


@dataclass
class Traps:
    """Faults of one rank that wait for their moment; each strikes once, `STORE_CUT` for good."""

    armed: set[FaultKind] = field(default_factory=set)

    def spring(self, kind: FaultKind) -> bool:
        """Whether it strikes now."""
        if kind not in self.armed:
            return False
        self.armed.discard(kind)
        return True


class Around:
    """Passes everything on to what it wraps."""

    def __init__(self, inner: Any, traps: Traps) -> None:
        self._inner = inner
        self._traps = traps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class RiggedFabric(Around):
    """A rank's connection.

    Attributes:
        control: its rigged control plane.
        communicators: its communicators, by purpose.
    """

    def __init__(self, inner: Any, traps: Traps) -> None:
        super().__init__(inner, traps)
        self.control = RiggedControl(inner.control, traps)
        self.communicators: dict[str, Any] = {}

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        communicator: Any = RiggedCommunicator(self._inner.open(purpose, ranks), self._traps)
        self.communicators[purpose] = communicator
        rigged: Communicator = communicator
        return rigged


class RiggedControl(Around):
    """Loses a ballot, or the store; keeps what was decided, also what is forgotten later.

    Attributes:
        decisions: decisions by question.
    """

    def __init__(self, inner: Any, traps: Traps) -> None:
        super().__init__(inner, traps)
        self.decisions: dict[str, bytes] = {}

    def cast(self, question: str, ballot: bytes) -> None:
        self._reach()
        if not self._traps.spring(FaultKind.BALLOT_LOST):
            self._inner.cast(question, ballot)

    def collect(
        self, question: str, timeout: float, ranks: Sequence[int] | None = None
    ) -> tuple[bytes, ...]:
        self._reach()
        ballots: tuple[bytes, ...] = self._inner.collect(question, timeout, ranks)
        return ballots

    def decide(self, question: str, value: bytes) -> bytes:
        self._reach()
        decision: bytes = self._inner.decide(question, value)
        self.decisions[question] = decision
        return decision

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        self._reach()
        self._inner.forget(question, ranks)

    def _reach(self) -> None:
        if FaultKind.STORE_CUT in self._traps.armed:
            raise ControlPlaneLost("the store does not answer")


class RiggedCommunicator(Around):
    """Loses a blob: what was to receive it receives nothing."""

    def exchange(self, plan: Exchange) -> Work:
        if plan.sends and self._traps.spring(FaultKind.MESSAGE_LOST):
            plan = Exchange(sends=plan.sends[1:], receives=plan.receives)
        work: Work = self._inner.exchange(plan)
        return work


class RiggedStore(Around):
    """Flips a bit of what was packed, staged or written."""

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        self._inner.pack(slots, blob, stream)
        if self._traps.spring(FaultKind.BLOB_FLIPPED):
            stream.launch(lambda: blob.__setitem__(1, blob[1] ^ 0x40))

    def unpack(self, blob: Tensor, staging: Sequence[int], stream: Stream) -> None:
        self._inner.unpack(blob, staging, stream)
        if self._traps.spring(FaultKind.STAGING_FLIPPED):
            row = self._inner._staging[staging[-1]]
            stream.launch(lambda: row.__setitem__(2, row[2] ^ 0x20))

    def write(
        self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]], stream: Stream
    ) -> None:
        self.refuse()
        self._inner.write(slots, sources, stream)
        self.spoil(slots, lambda flip: stream.launch(flip))

    def refuse(self) -> None:
        """Raise what a write that fails does, if that is due."""
        if self._traps.spring(FaultKind.WRITE_FAILS):
            raise Planted("the slots cannot be written")

    def spoil(self, slots: Sequence[int], let: Callable[[Callable[[], object]], object]) -> None:
        """Flip a bit of the last of these slots, if that is due; `let` says when."""
        if self._traps.spring(FaultKind.WRITE_FLIPPED):
            row = self._inner._slots[slots[-1]][0]
            let(lambda: row.__setitem__(3, row[3] ^ 0x10))
