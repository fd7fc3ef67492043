"""The handle of an asynchronous operation."""

from typing import Protocol, runtime_checkable

from equipoise.hal.stream import Stream


@runtime_checkable
class Work(Protocol):
    """An operation in flight.

    It owns its buffers until the operation has ended, however early the caller drops it
    (clauses K1, K2), and dropping it blocks the host for no peer (K6). Every method may be called
    any number of times, in any order, from any thread (K3).
    """

    def done(self) -> bool:
        """Whether it has ended; true also after a failure, which `result` then raises (K5)."""
        ...

    def wait(self, stream: Stream) -> None:
        """Run what is launched on `stream` from now on after the operation.

        A stream that waits for an operation which fails has failed too (clause E10).

        Raises:
            CommunicatorFailed: the operation has failed already; the stream is as it was.
        """
        ...

    def result(self, timeout: float) -> None:
        """Block the host until the operation ended.

        Raises:
            ResultPending: not within `timeout` seconds; the operation continues (soft).
            OperationTimeout: the operation's own deadline passed (hard).
            CommunicatorFailed: the operation failed.
        """
        ...

    def cancel(self) -> None:
        """End the operation for its issuer, and fail the communicator (clause E4).

        From then on `done` is true and `result` raises `CommunicatorFailed`, unless the operation
        had ended before. The buffers must not be used until the library releases them.
        """
        ...
