"""Mutants of gloo: works that fail or are cancelled, and streams that wait for them."""

from contextlib import suppress

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import gloo_with

from equipoise.backends.cpu.gloo_work import REPORT_SLACK, GlooWork
from equipoise.hal.errors import CommunicatorFailed, EquipoiseError
from equipoise.hal.stream import Stream


class CancelWaitsForDeadline(GlooWork):
    """A cancelled operation continues to its deadline, and may end well."""

    def cancel(self) -> None:
        self.watch()
        self._on_failed(CommunicatorFailed(f"{self._label} was cancelled"))


class CancelEndsWell(GlooWork):
    """A cancelled operation has ended well."""

    def cancel(self) -> None:
        self.watch()
        self._on_failed(CommunicatorFailed(f"{self._label} was cancelled"))
        self._settle(None)


class CancelKeepsCommunicator(GlooWork):
    """A cancel does not fail the communicator."""

    def cancel(self) -> None:
        self.watch()
        self._settle(CommunicatorFailed(f"{self._label} was cancelled"))


class IgnoresFailedWork(GlooWork):
    """A stream that waits for an operation continues however it ends."""

    def wait(self, stream: Stream) -> None:
        if self.done():
            self._raise_failure()

        def program() -> None:
            with suppress(EquipoiseError):
                self.result(self._remaining() + REPORT_SLACK)

        stream.launch(program)


class FailsStreamNotCall(GlooWork):
    """Waiting for what has failed fails the stream, which had nothing to do with it."""

    def wait(self, stream: Stream) -> None:
        stream.launch(lambda: self.result(self._remaining() + REPORT_SLACK))


class IgnoresEarlierFailure(GlooWork):
    """Waiting for what has failed is waiting for nothing."""

    def wait(self, stream: Stream) -> None:
        if not self.done():
            super().wait(stream)


CANCEL = "a-cancelled-operation-keeps-its-buffers-and-fails-its-communicator"
WAITS = "a-stream-that-waits-for-a-failed-work-fails"
MUTANTS = (
    Mutant(
        name="a-cancelled-operation-goes-on",
        clause="E4",
        broken="After a cancel the result comes with the deadline, or with the data.",
        property=CANCEL,
        subject=gloo_with(work=CancelWaitsForDeadline),
        real=True,
    ),
    Mutant(
        name="a-cancelled-operation-ends-well",
        clause="E4",
        broken="After a cancel the result raises nothing.",
        property=CANCEL,
        subject=gloo_with(work=CancelEndsWell),
        real=True,
    ),
    Mutant(
        name="a-cancel-is-kept-from-the-communicator",
        clause="E4",
        broken="After a cancel the communicator takes operations as before.",
        property=CANCEL,
        subject=gloo_with(work=CancelKeepsCommunicator),
        real=True,
    ),
    Mutant(
        name="a-stream-goes-on-behind-a-failed-work",
        clause="E10",
        broken="A stream that waits for an operation does not hear that it failed.",
        property=WAITS,
        subject=gloo_with(work=IgnoresFailedWork),
        real=True,
    ),
    Mutant(
        name="a-failed-work-fails-whoever-asks",
        clause="E10",
        broken="Waiting for what has failed long ago fails the stream instead of the call.",
        property=WAITS,
        subject=gloo_with(work=FailsStreamNotCall),
        real=True,
    ),
    Mutant(
        name="a-failed-work-is-waited-for-in-vain",
        clause="E10",
        broken="Waiting for what has failed long ago raises nothing.",
        property=WAITS,
        subject=gloo_with(work=IgnoresEarlierFailure),
        real=True,
    ),
)
