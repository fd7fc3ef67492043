"""A stand-in for libnccl.so, of HCCL's C functions on the simulated device.

As on a GPU: a small send ends when its bytes lie in a buffer, whether anybody receives them or
not; and an abort ends what is under way without an error of the stream. HCCL's simulation can do
neither: so there is a function for the one, and for the other a stream behind the curtain.

A non-blocking communicator does as NCCL's do: what would wait, and every launch, is done by a
thread, which may well come later than what the caller does next; until then the communicator takes
nothing but an abort, which ends that thread too, whoever it waits for. A group in which a call has
failed launches nothing.
"""

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cudasim.sim_calls import Acl, Item, hccl
from equipoise.backends.cuda import nccl_api
from equipoise.backends.cuda.nccl_api import MAGIC, NcclConfig, NcclUniqueId
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

VERSION = 22703
"""The one that this one behaves like."""
TYPES = {0: 0, 2: 2, 4: 5, 6: 3, 7: 4, 9: 11}
"""HCCL's numbers for NCCL's types."""
SIZES = {0: 1, 1: 1, 2: 4, 4: 8, 6: 2, 7: 4, 9: 2}
SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE, IN_PROGRESS = 2, 4, 5, 7
SEND, RECEIVE = 0, 1
FINE = ctypes.create_string_buffer(b"no error")
WRONG = ctypes.create_string_buffer(b"unhandled system error")
_OWN = {
    "version": "ncclGetVersion",
    "unique_id": "ncclGetUniqueId",
    "join": "ncclCommInitRankConfig",
    "finalize": "ncclCommFinalize",
    "destroy": "ncclCommDestroy",
    "abort": "ncclCommAbort",
    "async_error": "ncclCommGetAsyncError",
    "group_start": "ncclGroupStart",
    "group_end": "ncclGroupEnd",
    "all_reduce": "ncclAllReduce",
    "reduce_scatter": "ncclReduceScatter",
    "broadcast": "ncclBroadcast",
    "all_gather": "ncclAllGather",
    "send": "ncclSend",
    "receive": "ncclRecv",
    "error_string": "ncclGetErrorString",
    "last_error": "ncclGetLastError",
}


@dataclass(frozen=True)
class Message:
    """A send or a receive inside a group."""

    direction: int
    address: int
    nbytes: int
    peer: int


class Curtain:
    """One communicator of HCCL's, and a stream behind the curtain for what is sent ahead."""

    def __init__(self, comm: int, acl: Acl) -> None:
        self._comm = comm
        self._acl = acl
        self._stream = 0
        self._ahead: list[tuple[list[int], int]] = []

    def run(self, lane: int, name: str, *arguments: int) -> int:
        """A function of HCCL's on the lane."""
        self._after_those_ahead(lane)
        return _code(getattr(hccl(), name)(*arguments, self._comm, lane))

    def exchange(self, lane: int, messages: Sequence[Message]) -> int:
        """Messages; where the lane receives nothing it goes on once everything is in buffers."""
        if any(message.direction == RECEIVE for message in messages):
            self._after_those_ahead(lane)
            return self._batches(messages, lane)
        acl = self._acl
        self._reap()
        copied = [replace(m, address=acl.copy(m.address, m.nbytes, lane)) for m in messages]
        self._stream = self._stream or acl.stream()
        acl.order(lane, self._stream)
        code = self._batches(copied, self._stream)
        self._ahead.append(([m.address for m in copied], acl.mark(self._stream)))
        return code

    def destroy(self) -> int:
        """Nothing is under way."""
        code = _code(hccl().HcclCommDestroy(self._comm))
        self._reap()
        return code

    def abort(self) -> int:
        """What is under way ends, and ends well."""
        return _code(hccl().npusim_abort_communicator(self._comm))

    def _after_those_ahead(self, lane: int) -> None:
        """Messages of a pair are told apart by their order alone."""
        self._reap()
        if self._ahead:
            self._acl.order(self._stream, lane)

    def _reap(self) -> None:
        while self._ahead and self._acl.reached(self._ahead[0][1]):
            addresses, mark = self._ahead.pop(0)
            self._acl.drop(mark)
            for address in addresses:
                self._acl.free(address)

    def _batches(self, messages: Sequence[Message], stream: int) -> int:
        """HCCL takes one message a pair and direction in a batch; NCCL any number, in order."""
        message_counts: Counter[tuple[int, int]] = Counter()
        layers: dict[int, list[Message]] = {}
        for message in messages:
            place = (message.direction, message.peer)
            layers.setdefault(message_counts[place], []).append(message)
            message_counts[place] += 1
        for _, layer in sorted(layers.items()):
            items = [Item(m.direction, m.address, m.nbytes, 0, m.peer) for m in layer]
            item_array = (Item * len(layer))(*items)
            if code := _code(hccl().HcclBatchSendRecv(item_array, len(layer), self._comm, stream)):
                return code
        return 0


class Member:
    """A rank's part of a communicator, and the thread that does what it was called for.

    Args:
        acl: the driver.
        blocking: whether calls return when that is done.
    """

    def __init__(self, acl: Acl, blocking: bool) -> None:
        self._acl = acl
        self._blocking = blocking
        self._device = acl.device()
        self._thread: threading.Thread | None = None
        self._given_up = ctypes.c_int32(0)
        self.curtain: Curtain | None = None
        self.code = 0

    def begin(self, call: Callable[[], int]) -> int:
        """What NCCL returns of the call, which begins now."""
        if self.code:
            return INVALID_ARGUMENT  # used before the call before has come through, or failed
        if self._blocking:
            return call()
        self.code = IN_PROGRESS

        def run() -> None:
            self._acl.use(self._device)
            self.code = call()

        self._thread = threading.Thread(
            target=NATIVE_CALL_GUARD(run), name="cudasim.nccl", daemon=True
        )
        self._thread.start()
        return IN_PROGRESS

    def join(self, size: int, place: bytes, rank: int) -> int:
        """Wait until all ranks have come."""
        handle = ctypes.c_void_p()
        until = ctypes.byref(self._given_up)
        if hccl().npusim_join_communicator(size, place, rank, ctypes.byref(handle), until):
            return SYSTEM_ERROR
        self.curtain = Curtain(int(handle.value or 0), self._acl)
        return 0

    def abort(self) -> int:
        """As ncclCommAbort, which waits for the thread of a call that has not come through."""
        self._given_up.value = 1
        if self.curtain is None:
            self._await()  # first: a join that has just succeeded leaves something to abort
        code = 0 if self.curtain is None else self.curtain.abort()
        self._await()
        return code

    def _await(self) -> None:
        if self._thread is not None:
            self._thread.join()


class SimulatedNccl:
    """Has NCCL's functions as attributes, to be called as those of a loaded library.

    Args:
        flushed: a lane's handle, once everything was launched that came before.
    """

    def __init__(self, flushed: Callable[[int], int]) -> None:
        self._acl = Acl()
        self._flushed = flushed
        self._comms: dict[int, Member] = {}
        self._numbers = itertools.count(1)
        self._mine = threading.local()
        parameters = {**nccl_api._PARAMETERS, **nccl_api._TEXTS}
        for method, name in _OWN.items():
            answer = ctypes.c_void_p if name in nccl_api._TEXTS else ctypes.c_int
            kind = ctypes.CFUNCTYPE(answer, *parameters[name])
            setattr(self, name, kind(getattr(self, f"_{method}")))

    def _version(self, out: Any) -> int:
        out[0] = VERSION
        return 0

    def _unique_id(self, out: Any) -> int:
        return int(hccl().HcclGetRootInfo(out))

    def _join(self, out: Any, size: int, place: NcclUniqueId, rank: int, config: Any) -> int:
        config_struct = config[0]
        if (config_struct.size, config_struct.magic) != (
            ctypes.sizeof(NcclConfig),
            MAGIC,
        ) or config_struct.version > VERSION:
            return INVALID_ARGUMENT
        member = Member(self._acl, blocking=config_struct.blocking != 0)
        number = next(self._numbers)
        self._comms[number] = member
        out[0] = number
        where = ctypes.string_at(ctypes.addressof(place), ctypes.sizeof(place))
        return member.begin(lambda: member.join(size, where, rank))

    def _finalize(self, comm: int) -> int:
        return self._comms[comm].begin(lambda: 0)

    def _destroy(self, comm: int) -> int:
        curtain = self._comms.pop(comm).curtain
        return SYSTEM_ERROR if curtain is None else curtain.destroy()

    def _abort(self, comm: int) -> int:
        return self._comms.pop(comm).abort()

    def _async_error(self, comm: int, out: Any) -> int:
        out[0] = self._comms[comm].code
        return 0

    def _group_start(self) -> int:
        self._mine.group, self._mine.failed = [], {}
        return 0

    def _group_end(self) -> int:
        group, self._mine.group = self._mine.group, None
        for comm, code in self._mine.failed.items():
            self._comms[comm].code = code
            return int(code)
        if not group:
            return 0
        (place,) = {(comm, lane) for comm, lane, _ in group}
        comm, lane = place
        messages = [message for _, _, message in group]
        return self._begin(comm, lane, lambda curtain, to: curtain.exchange(to, messages))

    def _send(self, address: int, count: int, kind: int, peer: int, comm: int, lane: int) -> int:
        return self._message(SEND, address, count * SIZES.get(kind, 0), peer, comm, lane)

    def _receive(self, address: int, count: int, kind: int, peer: int, comm: int, lane: int) -> int:
        return self._message(RECEIVE, address, count * SIZES.get(kind, 0), peer, comm, lane)

    def _message(
        self, direction: int, address: int, nbytes: int, peer: int, comm: int, lane: int
    ) -> int:
        group = getattr(self._mine, "group", None)
        if group is None:
            return INVALID_USAGE  # possible, and not in use
        if peer < 0:
            self._mine.failed[comm] = INVALID_ARGUMENT
            return INVALID_ARGUMENT
        group.append((comm, lane, Message(direction, address, nbytes, peer)))
        return 0

    def _all_reduce(
        self, source: int, out: int, count: int, kind: int, how: int, comm: int, lane: int
    ) -> int:
        return self._run(comm, lane, "HcclAllReduce", source, out, count, TYPES[kind], how)

    def _reduce_scatter(
        self, source: int, out: int, count: int, kind: int, how: int, comm: int, lane: int
    ) -> int:
        return self._run(comm, lane, "HcclReduceScatter", source, out, count, TYPES[kind], how)

    def _broadcast(
        self, source: int, out: int, count: int, kind: int, root: int, comm: int, lane: int
    ) -> int:
        return self._run(comm, lane, "HcclBroadcast", out, count, TYPES[kind], root)

    def _all_gather(
        self, source: int, out: int, count: int, kind: int, comm: int, lane: int
    ) -> int:
        return self._run(comm, lane, "HcclAllGather", source, out, count, TYPES[kind])

    def _run(self, comm: int, lane: int, name: str, *arguments: int) -> int:
        return self._begin(comm, lane, lambda curtain, to: curtain.run(to, name, *arguments))

    def _begin(self, comm: int, lane: int, call: Callable[[Curtain, int], int]) -> int:
        """A launch behind all that the lane was given until now."""
        member, to = self._comms[comm], self._flushed(lane)
        curtain = member.curtain
        if curtain is None:
            return INVALID_ARGUMENT
        return member.begin(lambda: call(curtain, to))

    def _error_string(self, code: int) -> int:
        return ctypes.addressof(FINE if code == 0 else WRONG)

    def _last_error(self, comm: int) -> int:
        self._mine.last = ctypes.create_string_buffer(self._acl.last_error())
        return ctypes.addressof(self._mine.last)


def _code(code: int) -> int:
    return SYSTEM_ERROR if code else 0
