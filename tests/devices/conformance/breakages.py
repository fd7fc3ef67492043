"""The eleven ways in which a backend for Ascend is most easily wrong.

Each was a bug of somebody's, or is one call away from one: the vendor's calls do not refuse it, and
on a device that happens to be quick enough it shows nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from devices.conformance.breakage import Breakage, Patch
from torch import Tensor

from equipoise.backends.ascend import host_functions, lock_flags, npu_runtime
from equipoise.backends.ascend.accelerator import AscendAccelerator
from equipoise.backends.devices import event, slots
from equipoise.backends.devices.collectives import communicator, work
from equipoise.backends.devices.collectives.comm_set import CommSet
from equipoise.backends.devices.collectives.communicator import P2PRound
from equipoise.backends.devices.runtime import Device
from equipoise.hal.support.page_pool import PoolPage


def _missing_event_wait(patch: Patch) -> None:
    patch(event.DeviceRecording, "block_stream", lambda self, stream: None)


def _early_pinned_read(patch: Patch) -> None:
    # The copies that fill what the function reads are still on their way.
    patch(host_functions.HostJob, "enqueue", lambda self: self.run())


def _pinned_overwrite(patch: Patch) -> None:
    healthy = PoolPage.give_back
    patch(PoolPage, "give_back", lambda self, after: healthy(self, None))


def _missing_stream_record(patch: Patch) -> None:
    patch(slots, "record_stream_use", lambda stream, *tensors: None)


def _unwaited_receive(patch: Patch) -> None:
    patch(work.DeviceWork, "wait", lambda self, stream: None)


def _early_send_buffer_reuse(patch: Patch) -> None:
    patch(work.DeviceWork, "done", lambda self: True)


def _per_tensor_messages(patch: Patch) -> None:
    healthy = communicator.plan_round

    def halves(plan: Any) -> P2PRound:
        whole = healthy(plan)
        operations, blobs, peers = [], [], []
        for operation, blob, peer in zip(whole.operations, whole.blobs, whole.peers, strict=True):
            for part in torch.tensor_split(blob, 2):
                operations.append(operation)
                blobs.append(part)
                peers.append(peer)
        return P2PRound(tuple(operations), tuple(blobs), tuple(peers))

    patch(communicator, "plan_round", halves)


def _send_before_receive(patch: Patch) -> None:
    def message(self: CommSet, what: str, pair: tuple[int, int], tensor: Tensor) -> work.DeviceWork:
        sends = pair[0] == self.rank
        operation, peer = ("isend", pair[1]) if sends else ("irecv", pair[0])
        payload = tensor if tensor.numel() else self.scratch
        return self.collective(what, lambda g: g.batch([operation], [payload], [peer]), (payload,))

    patch(CommSet, "message", message)


def _wait_on_an_unrecorded_event(patch: Patch) -> None:
    def latest(self: event.DeviceEvent) -> event.DeviceRecording:
        return self._recording or self.start_recording(Device(npu_runtime.RUNTIME, 0))

    patch(event.DeviceEvent, "latest", latest)


def _offset_view_of_a_private_format(patch: Patch) -> None:
    healthy = AscendAccelerator.empty_private

    def stacked(self: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return healthy(self, (2, *shape), dtype)[1]

    patch(AscendAccelerator, "empty_private", stacked)


def _word_lent_again_whatever_came_first(patch: Patch) -> None:
    patch(lock_flags.NpuAcquireFlag, "reusable", property(lambda self: True))


BREAKAGES = (
    Breakage(
        name="missing_event_wait",
        broken="a stream that waits for an event does not",
        property="launches-run-in-the-order-that-streams-and-events-give",
        plant=_missing_event_wait,
    ),
    Breakage(
        name="word_lent_again_whatever_came_first",
        broken="a lock's word whose signal came before its wait is waited for again",
        property="lock-calls-match-the-lock-model",
        plant=_word_lent_again_whatever_came_first,
        ranks=2,
    ),
    Breakage(
        name="early_pinned_read",
        broken="the share solver reads page-locked memory before the copy into it has ended",
        property="kernels-equal-the-reference",
        plant=_early_pinned_read,
    ),
    Breakage(
        name="pinned_overwrite",
        broken="a page of the host pool is handed out again while a copy from it is on its way",
        property="a-page-is-not-handed-out-under-a-copy",
        plant=_pinned_overwrite,
    ),
    Breakage(
        name="missing_stream_record",
        broken="the allocator is not told which streams use what an operation was given",
        property="slot-operations-own-their-buffers",
        plant=_missing_stream_record,
    ),
    Breakage(
        name="unwaited_receive",
        broken="a stream that waits for an operation does not",
        property="a-stream-waits-for-an-operation-without-the-host",
        plant=_unwaited_receive,
        ranks=2,
    ),
    Breakage(
        name="early_send_buffer_reuse",
        broken="an operation says that it has ended as soon as it was launched",
        property="works-end-in-any-order",
        plant=_early_send_buffer_reuse,
        ranks=2,
    ),
    Breakage(
        name="per_tensor_messages",
        broken="a round gives HCCL two blocks for a pair and direction",
        property="a-round-brings-every-blob-whole",
        plant=_per_tensor_messages,
        ranks=2,
    ),
    Breakage(
        name="send_before_receive",
        broken="sends and receives of a pair share one stream, so that both sides may send first",
        property="sends-need-not-wait-for-receives",
        plant=_send_before_receive,
        ranks=2,
    ),
    Breakage(
        name="wait_on_an_unrecorded_event",
        broken="an event that was never recorded is waited for, which the vendor lets pass",
        property="an-unrecorded-event-cannot-be-waited-for",
        plant=_wait_on_an_unrecorded_event,
    ),
    Breakage(
        name="offset_view_of_a_private_format",
        broken="a tensor in a private format is a view with an offset",
        property="private-formats-travel-whole",
        plant=_offset_view_of_a_private_format,
    ),
)
