"""The ways in which a communicator over NCCL is most easily wrong.

Each is one call away from the right one, NCCL refuses none, and on a GPU that happens to be quick
enough most of them show nothing.
"""

from typing import Any

from devices.conformance.breakage import Breakage, Patch

from equipoise.backends.cuda import driver_streams, nccl, nccl_comm
from equipoise.backends.cuda.driver_streams import DriverStream, DriverStreamPool
from equipoise.backends.devices.collectives.comm_set import CommSet


def _unanswered_message(patch: Patch) -> None:
    alone: Any = lambda self, direction, blob, peer: self.batch([direction], [blob], [peer])  # noqa: E731
    patch(nccl_comm.NcclComm, "message", alone)


def _answered_round(patch: Patch) -> None:
    # NCCL matches by order alone, so that an answer may be taken for a message that never came.
    def batch(self: Any, directions: Any, blobs: Any, peers: Any) -> Any:
        def launch(comm: Any, to: int) -> None:
            with self._api.group(comm):
                for direction, blob, peer in zip(directions, blobs, peers, strict=True):
                    messages, answers = [(peer, blob)], [(peer, self._answer)]
                    incoming, outgoing = (
                        (messages, answers) if direction == "irecv" else (answers, messages)
                    )
                    self._launch_messages(incoming, outgoing, comm, to)

        return self._launch(launch)

    patch(nccl_comm.NcclComm, "batch", batch)


def _launch_ahead_of_its_inputs(patch: Patch) -> None:
    patch(nccl_comm.NcclComm, "_wait_for_current_stream", lambda self: None)


def _launch_not_awaited(patch: Patch) -> None:
    # A non-blocking communicator launches on a thread of NCCL's: the event may stand before it.
    patch(nccl_comm.NcclComm, "_launched", lambda self: True)


def _early_end(patch: Patch) -> None:
    # The event stands behind nothing: the stream that it is recorded on was given nothing.
    patch(nccl_comm.NcclHandle, "is_complete", lambda self: True)


def _one_stream_for_all(patch: Patch) -> None:
    healthy = DriverStreamPool.take
    stream_by_pool: dict[int, DriverStream] = {}

    def take(self: DriverStreamPool) -> DriverStream:
        if id(self) not in stream_by_pool:
            stream_by_pool[id(self)] = healthy(self)
        return stream_by_pool[id(self)]

    patch(DriverStreamPool, "take", take)
    patch(nccl, "release_stream", driver_streams.new_stream)


def _unkept_promise(patch: Patch) -> None:
    patch(nccl.FlagEvent, "wait", lambda self: None)


def _abort_in_name_only(patch: Patch) -> None:
    def abort(self: Any) -> None:
        self._retired = True

    patch(CommSet, "abort", abort)


BREAKAGES = (
    Breakage(
        name="unanswered_message",
        broken="a send ends when its bytes lie in a buffer, whether anybody receives them or not",
        property="an-unmatched-operation-fails-only-its-communicator",
        plant=_unanswered_message,
        ranks=2,
    ),
    Breakage(
        name="answered_round",
        broken="messages of a round are answered on the way of the round's own messages",
        property="an-unmatched-operation-fails-only-its-communicator",
        plant=_answered_round,
        ranks=2,
    ),
    Breakage(
        name="launch_ahead_of_its_inputs",
        broken="the communicator's stream does not wait for what the caller's was given",
        property="operations-are-ordered-after-the-current-stream",
        plant=_launch_ahead_of_its_inputs,
        ranks=2,
    ),
    Breakage(
        name="launch_not_awaited",
        broken="the event of an operation is recorded while NCCL still launches it",
        property="works-end-in-any-order",
        plant=_launch_not_awaited,
        ranks=2,
    ),
    Breakage(
        name="early_end",
        broken="an operation has ended as soon as it was launched",
        property="works-end-in-any-order",
        plant=_early_end,
        ranks=2,
    ),
    Breakage(
        name="one_stream_for_all",
        broken="all of a device's communicators run on one stream",
        property="sends-need-not-wait-for-receives",
        plant=_one_stream_for_all,
        ranks=2,
    ),
    Breakage(
        name="unkept_promise",
        broken="a stream does not wait for a message whose link is not there yet",
        property="a-stream-waits-for-an-operation-without-the-host",
        plant=_unkept_promise,
        ranks=2,
    ),
    Breakage(
        name="abort_in_name_only",
        broken="an abort lets what is in flight go on to its deadline",
        property="abort-ends-what-is-in-flight",
        plant=_abort_in_name_only,
        ranks=2,
    ),
)
