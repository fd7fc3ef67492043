"""A stand-in for libnccl.so, of HCCL's C functions on the simulated device.

As on a GPU: a small send ends when its bytes lie in a buffer, whether anybody receives them or
not; and an abort ends what is under way without an error of the stream. HCCL's simulation can do
neither. So its operations run on a stream behind the curtain, and the caller's stream waits for a
word.
"""

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cudasim.sim_calls import Acl, Item, hccl
from equipoise.backends.cuda import nccl_api
from equipoise.backends.cuda.nccl_api import UniqueId

VERSION = 22703
"""The one that this one behaves like."""
TYPES = {0: 0, 2: 2, 4: 5, 6: 3, 7: 4, 9: 11}
"""HCCL's numbers for NCCL's types."""
SIZES = {0: 1, 1: 1, 2: 4, 4: 8, 6: 2, 7: 4, 9: 2}
SYSTEM_ERROR, INVALID_USAGE = 2, 5
SEND, RECEIVE = 0, 1
_OWN = {
    "version": "ncclGetVersion",
    "unique_id": "ncclGetUniqueId",
    "join": "ncclCommInitRank",
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

    way: int
    address: int
    nbytes: int
    peer: int


class Curtain:
    """One communicator of HCCL's, the stream behind the curtain, and the words before it."""

    def __init__(self, comm: int, acl: Acl) -> None:
        self.comm = comm
        self._acl = acl
        self._stream = acl.stream()
        self._words: list[Any] = []
        self._spare: list[Any] = []
        self._copies: list[tuple[list[int], Any]] = []

    def run(self, lane: int, call: Callable[[int], int]) -> int:
        """`call(stream)` behind the lane, and what the lane gets behind it."""
        acl, word = self._acl, self._word()
        acl.order(lane, self._stream)
        code = call(self._stream)
        acl.write(word, self._stream)
        acl.wait(word, lane)
        return SYSTEM_ERROR if code else 0

    def exchange(self, lane: int, messages: Sequence[Message]) -> int:
        """Messages; where the lane receives nothing it goes on once everything is in buffers."""
        eager = all(message.way == SEND for message in messages)
        if not eager:
            return self.run(lane, lambda stream: self._batches(messages, stream))
        acl, word, done = self._acl, self._word(), self._new()
        acl.order(lane, self._stream)
        self._copies = [copies for copies in self._copies if not self._freed(*copies)]
        copied = [self._copied(message) for message in messages]
        self._copies.append(([message.address for message in copied], done))
        acl.write(word, self._stream)
        code = self._batches(copied, self._stream)
        acl.write(done, self._stream)
        acl.wait(word, lane)
        return SYSTEM_ERROR if code else 0

    def destroy(self) -> int:
        """Nothing is under way."""
        code = self._end()
        for addresses, _ in self._copies:
            for address in addresses:
                self._acl.free(address)
        self._acl.drop(self._stream)
        return code

    def abort(self) -> int:
        """What is under way ends with an error behind the curtain, and well before it."""
        code = self._end()
        for word in self._words:
            self._acl.store(word)
        return code

    def broken(self) -> bool:
        """Whether something has failed behind the curtain."""
        return self._acl.failed(self._stream)

    def _end(self) -> int:
        return SYSTEM_ERROR if hccl().HcclCommDestroy(ctypes.c_void_p(self.comm)) else 0

    def _word(self) -> Any:
        """One that a lane waits for."""
        self._spare += [word for word in self._words if self._acl.taken(word)]
        self._words = [word for word in self._words if not self._acl.taken(word)]
        self._words.append(self._new())
        return self._words[-1]

    def _new(self) -> Any:
        return self._acl.fresh(self._spare.pop()) if self._spare else self._acl.word()

    def _copied(self, message: Message) -> Message:
        address = self._acl.copy(message.address, message.nbytes, self._stream)
        return Message(SEND, address, message.nbytes, message.peer)

    def _freed(self, addresses: Sequence[int], done: Any) -> bool:
        if not self._acl.written(done):
            return False
        for address in addresses:
            self._acl.free(address)
        self._spare.append(done)
        return True

    def _batches(self, messages: Sequence[Message], stream: int) -> int:
        """HCCL takes one message a pair and direction in a batch; NCCL any number, in order."""
        seen: Counter[tuple[int, int]] = Counter()
        layers: dict[int, list[Message]] = {}
        for message in messages:
            place = (message.way, message.peer)
            layers.setdefault(seen[place], []).append(message)
            seen[place] += 1
        for _, layer in sorted(layers.items()):
            items = (Item * len(layer))(
                *(Item(m.way, m.address, m.nbytes, 0, m.peer) for m in layer)
            )
            if code := hccl().HcclBatchSendRecv(
                items, len(layer), ctypes.c_void_p(self.comm), ctypes.c_void_p(stream)
            ):
                return int(code)
        return 0


class SimulatedNccl:
    """Has NCCL's functions as attributes, to be called as those of a loaded library.

    Args:
        flushed: a lane's handle, once everything was launched that came before.
    """

    def __init__(self, flushed: Callable[[int], int]) -> None:
        self._acl = Acl()
        self._flushed = flushed
        self._comms: dict[int, Curtain] = {}
        self._numbers = itertools.count(1)
        self._mine = threading.local()
        parameters = {**nccl_api._PARAMETERS, **nccl_api._TEXTS}
        for method, name in _OWN.items():
            answer = ctypes.c_char_p if name in nccl_api._TEXTS else ctypes.c_int
            kind = ctypes.CFUNCTYPE(answer, *parameters[name])
            setattr(self, name, kind(getattr(self, f"_{method}")))

    def _version(self, out: Any) -> int:
        out[0] = VERSION
        return 0

    def _unique_id(self, out: Any) -> int:
        return int(hccl().HcclGetRootInfo(out))

    def _join(self, out: Any, size: int, place: UniqueId, rank: int) -> int:
        made = ctypes.c_void_p()
        if hccl().HcclCommInitRootInfo(size, ctypes.byref(place), rank, ctypes.byref(made)):
            return SYSTEM_ERROR
        number = next(self._numbers)
        self._comms[number] = Curtain(int(made.value or 0), self._acl)
        out[0] = number
        return 0

    def _destroy(self, comm: int) -> int:
        return self._comms.pop(comm).destroy()

    def _abort(self, comm: int) -> int:
        return self._comms.pop(comm).abort()

    def _async_error(self, comm: int, out: Any) -> int:
        out[0] = SYSTEM_ERROR if self._comms[comm].broken() else 0
        return 0

    def _group_start(self) -> int:
        self._mine.group = []
        return 0

    def _group_end(self) -> int:
        group, self._mine.group = self._mine.group, None
        if not group:
            return 0
        (place,) = {(comm, lane) for comm, lane, _ in group}
        comm, lane = place
        return self._comms[comm].exchange(self._flushed(lane), [m for _, _, m in group])

    def _send(self, address: int, count: int, kind: int, peer: int, comm: int, lane: int) -> int:
        return self._message(SEND, address, count * SIZES[kind], peer, comm, lane)

    def _receive(self, address: int, count: int, kind: int, peer: int, comm: int, lane: int) -> int:
        return self._message(RECEIVE, address, count * SIZES[kind], peer, comm, lane)

    def _message(self, way: int, address: int, nbytes: int, peer: int, comm: int, lane: int) -> int:
        group = getattr(self._mine, "group", None)
        if group is None:
            return INVALID_USAGE  # possible, and not in use
        group.append((comm, lane, Message(way, address, nbytes, peer)))
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
        curtain = self._comms[comm]
        return curtain.run(
            self._flushed(lane),
            lambda stream: int(getattr(hccl(), name)(*arguments, curtain.comm, stream)),
        )

    def _error_string(self, code: int) -> bytes:
        return b"no error" if code == 0 else b"unhandled system error"

    def _last_error(self, comm: int) -> bytes:
        return self._acl.last_error()
