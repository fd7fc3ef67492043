"""Mutants of family *keepalive*: handles of operations."""

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import network_with

from equipoise.backends.virtual.operation import VirtualOperation
from equipoise.backends.virtual.work import DEADLINE, VirtualWork
from equipoise.hal.errors import CommunicatorFailed, ResultPending
from equipoise.hal.stream import Stream


class SingleShot(VirtualWork):
    """A second wait for the same work never returns."""

    _was_read = False

    def result(self, timeout: float) -> None:
        if self._was_read:
            raise ResultPending("still waiting")
        super().result(timeout)
        self._was_read = True


class OwnThreadOnly(VirtualWork):
    """Only the thread that issued an operation learns of its end."""

    def __init__(self, operation: VirtualOperation) -> None:
        super().__init__(operation)
        self._host = operation.communicator.world.host

    def result(self, timeout: float) -> None:
        if self._operation.communicator.world.host != self._host:
            raise ResultPending("this thread waits for nothing")
        super().result(timeout)


class WaitsOnlyBeforeTheEnd(VirtualWork):
    """A stream cannot wait for an operation that has ended."""

    def wait(self, stream: Stream) -> None:
        if self._operation.ended:
            raise CommunicatorFailed("there is nothing to wait for")
        super().wait(stream)


class FailsOnce(VirtualWork):
    """A failure is raised at the first call, and at no later one."""

    _has_raised = False

    def result(self, timeout: float) -> None:
        try:
            super().result(timeout)
        except CommunicatorFailed:
            if self._has_raised:
                return
            self._has_raised = True
            raise


class InOrderOnly(VirtualWork):
    """A result is handed out when all that was issued before has ended, too."""

    def __init__(self, operation: VirtualOperation) -> None:
        super().__init__(operation)
        pending = operation.communicator.world.network.pending
        same = operation.communicator
        self._before = [op for op in pending if op.communicator is same and op is not operation]

    def result(self, timeout: float) -> None:
        for operation in self._before:
            world = operation.communicator.world
            if not world.until(lambda op=operation: op.ended, timeout):  # type: ignore[misc]
                raise ResultPending(f"{operation.what} comes first")
        super().result(timeout)


class FirstHandleIsDropped(VirtualOperation):
    """Of a batch, the first handle is not waited for."""

    __slots__ = ()

    def progress(self) -> None:
        if self._natives is None or self.over:
            return
        natives = self._natives[1:] if len(self._natives) > 1 else self._natives
        if all(native.left == 0 for native in natives):
            self.finish()


class EarlyDone(VirtualWork):
    """Done as soon as both ends have met, although bytes are still to come."""

    def done(self) -> bool:
        operation = self._operation
        moving = operation.communicator.world.network.moving
        single = not operation.what.startswith("exchange")
        is_in_round = single and any(operation in is_in_round.operations for is_in_round in moving)
        return is_in_round or super().done()


class FailureIsAnEnd(VirtualWork):
    """An operation that failed counts as completed, and that is all."""

    def result(self, timeout: float) -> None:
        if not self._operation.ended:
            self._await(min(timeout, DEADLINE))


BUFFER_OWNERSHIP = "operations-own-their-buffers"
WORKS = "dropped-works-neither-cancel-nor-leak"
QUERIES = "an-ended-work-may-be-queried-by-any-thread"
FAILED_WORK = "a-failed-work-raises-at-every-call"
RESULT_AFTER_DONE = "result-does-not-block-after-done"
ORDER = "works-end-in-any-order"
LONELY = "an-unmatched-operation-fails-only-its-communicator"
TURNS = "threads-take-turns-on-one-communicator"
ROUNDS = "a-round-brings-every-blob-whole"
ABORTED = "abort-ends-what-is-in-flight"
AWAITED = "a-stream-waits-for-an-operation-without-the-host"
FAULTS = "a-fault-ends-what-depends-on-it-and-nothing-else"
CANCELLED = "a-cancelled-operation-keeps-its-buffers-and-fails-its-communicator"
WAITS = "a-stream-that-waits-for-a-failed-work-fails"
MISALIGNED = "misaligned-buffers-arrive-and-their-neighbours-stay"

MUTANTS = (
    Mutant(
        name="a-second-wait-never-returns",
        clause="K3",
        broken="A work can be waited for once, as gloo's handle.",
        property=QUERIES,
        subject=network_with(work=SingleShot),
    ),
    Mutant(
        name="only-the-issuing-thread-learns-of-the-end",
        clause="K3",
        broken="A result is refused to every thread but the one that issued.",
        property=QUERIES,
        subject=network_with(work=OwnThreadOnly),
        also=(FAILED_WORK,),  # there, too, both threads ask
    ),
    Mutant(
        name="no-stream-waits-for-what-has-ended",
        clause="K3",
        broken="wait raises after the end.",
        property=QUERIES,
        subject=network_with(work=WaitsOnlyBeforeTheEnd),
        also=(AWAITED,),  # a stream that waits may come after the end
    ),
    Mutant(
        name="a-failure-is-raised-once",
        clause="K3",
        broken="Whoever asks second is told that all is well.",
        property=FAILED_WORK,
        subject=network_with(work=FailsOnce),
        also=(CANCELLED,),  # it asks twice: before the other end comes, and after
    ),
    Mutant(
        name="results-come-in-the-order-of-issue",
        clause="K4",
        broken="A result waits for every operation that was issued before.",
        property=ORDER,
        subject=network_with(work=InOrderOnly),
        # in both there are earlier operations that this host does not wait for
        also=(
            WORKS,
            TURNS,
            "a-communicator-serves-hundreds-of-operations",
            "operations-are-ordered-after-the-current-stream",
        ),
    ),
    Mutant(
        name="the-first-handle-of-a-batch-is-dropped",
        clause="K4",
        broken="A batch ends without its first message (vLLM drops the first of its handles).",
        property=ORDER,
        subject=network_with(operation=FirstHandleIsDropped),
        # whoever sends rounds in which a rank has several blobs
        also=(
            BUFFER_OWNERSHIP,
            WORKS,
            ROUNDS,
            FAULTS,
            MISALIGNED,
            "a-rebuilt-communicator-carries-only-what-came-after",
            "an-unmatched-operation-fails-only-its-communicator",
        ),
    ),
    Mutant(
        name="done-before-the-bytes-are-there",
        clause="K5",
        broken="done says so when both ends have met (gloo's is_completed may be early).",
        property=RESULT_AFTER_DONE,
        subject=network_with(work=EarlyDone),
    ),
    Mutant(
        name="a-failed-operation-counts-as-completed",
        clause="K5",
        broken="result returns after a failure as if all were well (PyTorch).",
        property=FAILED_WORK,
        subject=network_with(work=FailureIsAnEnd),
        also=(LONELY, ABORTED, FAULTS, CANCELLED, WAITS),  # they ask how an operation failed
    ),
)
