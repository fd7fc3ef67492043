"""Mutants of family *failures*."""

from collections.abc import Sequence

from conformance.mutants.keepalive import Peers, all_borrowed
from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import network_with

from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.operation import VirtualOperation
from equipoise.backends.virtual.work import VirtualWork
from equipoise.hal.errors import CommunicatorFailed, OperationTimeout, ResultPending


class SilentDeadline(VirtualOperation):
    """At its deadline an operation ends, without an error."""

    __slots__ = ()

    def strike(self) -> bool:
        was_ended, self.ended = self.ended, True
        return not was_ended


class NamelessDeadline(VirtualOperation):
    """The error of a deadline says neither what it was nor what for."""

    __slots__ = ()

    def strike(self) -> bool:
        return self.fail(OperationTimeout, "connection closed by peer")


class FailsByItself(VirtualOperation):
    """At its deadline an operation fails, and its communicator continues."""

    __slots__ = ()

    def strike(self) -> bool:
        was_ended, self.ended = self.ended, True
        self._failure = (OperationTimeout, f"{self.what} passed its deadline")
        return not was_ended


class EndlessRounds(VirtualOperation):
    """A round has no deadline."""

    __slots__ = ()

    def strike(self) -> bool:
        return not self.what.startswith("exchange") and super().strike()


class FailsTogether(VirtualCommunicator):
    """What fails one communicator of a rank fails all."""

    def fail(self, kind: type[CommunicatorFailed], text: str, rebuilds: int) -> None:
        for other in self._fabric._open:
            VirtualCommunicator.fail(other, kind, text, other.rebuilds)


class RemembersMessages(VirtualCommunicator):
    """What was sent before a rebuild can arrive after it."""

    def _join(self, members: tuple[int, ...]) -> None:
        older = self.__dict__.get("_group")
        super()._join(members)
        if older is not None and older.members == self._group.members:
            self._group = older
            self.outbox.group = older


class StaysFailed(VirtualCommunicator):
    """A rebuilt communicator still says that it has failed."""

    def rebuild(self, ranks: Sequence[int]) -> None:
        failure = self._failure
        super().rebuild(ranks)
        self._failure = failure


class SoftWaitFails(VirtualWork):
    """Whoever gives up waiting fails the operation."""

    def _await(self, timeout: float) -> None:
        try:
            super()._await(timeout)
        except ResultPending:
            self._operation.fail(CommunicatorFailed, f"{self._operation.what}: wait timed out")
            raise


class SoftWaitLeavesCollective(SoftWaitFails):
    """Whoever gives up waiting for a collective fails it; messages live on."""

    def _await(self, timeout: float) -> None:
        if self._operation.what.startswith(("isend", "irecv", "exchange")):
            VirtualWork._await(self, timeout)
        else:
            super()._await(timeout)


class OwnsByTensor(VirtualCommunicator):
    """Messages own their buffers through the operation's list of tensors only."""

    def _messages(self, what: str, sends: Peers, receives: Peers) -> VirtualWork:
        work = super()._messages(what, all_borrowed(sends), all_borrowed(receives))
        work._operation.tensors = tuple(tensor for _, tensor in (*receives, *sends))
        return work


class CancelFrees(VirtualWork):
    """Cancelling releases the buffers at once."""

    def cancel(self) -> None:
        super().cancel()
        self._operation.tensors = ()


class CancelsAlone(VirtualWork):
    """A cancelled operation does not fail its communicator."""

    def cancel(self) -> None:
        operation = self._operation
        operation._failure = (CommunicatorFailed, f"{operation.what} was cancelled")
        operation.ended = True


class CloseForgets(VirtualCommunicator):
    """Closing forgets what is in flight: it never ends."""

    def close(self) -> None:
        for operation in self._pending():
            self.forget(operation)
        super().close()


class OpenAfterClose(VirtualCommunicator):
    """A closed communicator takes operations."""

    def close(self) -> None:
        failure = self._failure
        super().close()
        self._failure = failure


class AbortOnlyMarks(VirtualCommunicator):
    """After abort nothing is issued, but what is in flight waits for its deadline."""

    def abort(self) -> None:
        self.fail(CommunicatorFailed, f"{self._purpose!r} was aborted", self.rebuilds)


LONELY = "an-unmatched-operation-fails-only-its-communicator"
FAILED_WORK = "a-failed-work-raises-at-every-call"
REBUILT = "a-rebuilt-communicator-carries-only-what-came-after"
SOFT = "result-timeout-does-not-cancel-the-operation"
CANCELLED = "a-cancelled-operation-keeps-its-buffers-and-fails-its-communicator"
FAULTS = "a-fault-ends-what-depends-on-it-and-nothing-else"
CLOSING = "closing-ends-what-is-in-flight"
WAITS = "a-stream-that-waits-for-a-failed-work-fails"

MUTANTS = (
    Mutant(
        name="a-deadline-passes-in-silence",
        clause="P3",
        broken="An operation that nobody answered ends as if it had been (NCCL #2130).",
        property=LONELY,
        subject=network_with(operation=SilentDeadline),
        also=(
            FAILED_WORK,
            FAULTS,
            WAITS,
        ),  # all of them let deadlines pass, and ask for the failure
    ),
    Mutant(
        name="an-error-names-neither-operation-nor-purpose",
        clause="E1",
        broken="Whoever waited learns that a connection was closed, as with gloo.",
        property=LONELY,
        subject=network_with(operation=NamelessDeadline),
        also=(FAULTS,),  # a fault, too, is to be named by those whom it hits
    ),
    Mutant(
        name="a-communicator-goes-on-after-a-failure",
        clause="E2",
        broken="An operation fails by itself; the next one is accepted (NCCL #1013).",
        property=LONELY,
        subject=network_with(operation=FailsByItself),
    ),
    Mutant(
        name="no-deadline-strikes-a-round",
        clause="C8",
        broken="Whoever waits for a round whose peer stays away waits for ever.",
        property=LONELY,
        subject=network_with(operation=EndlessRounds),
        also=(FAILED_WORK, FAULTS),  # some of their failures are rounds without a peer
    ),
    Mutant(
        name="one-failure-fails-every-communicator",
        clause="X3",
        broken="Communicators of a rank fail together, as over one shared connection.",
        property=LONELY,
        subject=network_with(communicator=FailsTogether),
        also=(
            FAULTS,
            "abort-ends-what-is-in-flight",
        ),  # it looks at what continues next to the fault
    ),
    Mutant(
        name="old-messages-arrive-after-a-rebuild",
        clause="E9",
        broken="A receive of the rebuilt communicator takes what was sent before the failure.",
        property=REBUILT,
        subject=network_with(communicator=RemembersMessages),
    ),
    Mutant(
        name="a-rebuilt-communicator-stays-failed",
        clause="E9",
        broken="rebuild returns, and the next operation says that the communicator has failed.",
        property=REBUILT,
        subject=network_with(communicator=StaysFailed),
    ),
    Mutant(
        name="a-soft-wait-fails-the-operation",
        clause="E3",
        broken="A wait with a short time-out poisons the group, as with gloo.",
        property=SOFT,
        subject=network_with(work=SoftWaitFails),
    ),
    Mutant(
        name="a-soft-wait-fails-a-collective",
        clause="E3",
        broken="A rank that stops waiting for a collective leaves it; the others wait for it.",
        property=SOFT,
        subject=network_with(work=SoftWaitLeavesCollective),
    ),
    Mutant(
        name="cancel-frees-the-buffers",
        clause="E4",
        broken="The message that comes after a cancel is written to memory in use again.",
        property=CANCELLED,
        subject=network_with(communicator=OwnsByTensor, work=CancelFrees),
    ),
    Mutant(
        name="cancel-leaves-the-communicator-usable",
        clause="E4",
        broken="After a cancel the communicator goes on, one message out of step.",
        property=CANCELLED,
        subject=network_with(work=CancelsAlone),
    ),
    Mutant(
        name="close-forgets-what-is-in-flight",
        clause="E5",
        broken="Whoever waits for an operation of a closed communicator waits for ever.",
        property=CLOSING,
        subject=network_with(communicator=CloseForgets),
        also=(FAULTS,),  # survivors close, and are asked what they still hold
    ),
    Mutant(
        name="a-closed-communicator-takes-operations",
        clause="E5",
        broken="What is issued after close is accepted.",
        property=CLOSING,
        subject=network_with(communicator=OpenAfterClose),
    ),
    Mutant(
        name="abort-only-marks-the-communicator",
        clause="E8",
        broken="abort releases nobody who waits already (NCCL #1013).",
        property="abort-ends-what-is-in-flight",
        subject=network_with(communicator=AbortOnlyMarks),
    ),
)
