"""The part of NCCL's C interface that is in use, by ctypes: as it has been since NCCL 2.14.

No tensors here: addresses, counts and streams are numbers.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

import torch

NAME = "libnccl.so.2"
"""The one that torch has loaded, which is found by its name alone."""
OLDEST = (2, 14)
ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
SUM = 0
TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
Comm: TypeAlias = ctypes.c_void_p
"""One of NCCL's communicators."""


class UniqueId(ctypes.Structure):
    """Where a communicator's members meet; given to NCCL by value."""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


_POINTER, _COUNT, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_PARAMETERS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(_INT)],
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(Comm), _INT, UniqueId, _INT],
    "ncclCommDestroy": [Comm],
    "ncclCommAbort": [Comm],
    "ncclCommGetAsyncError": [Comm, ctypes.POINTER(_INT)],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclAllReduce": [_POINTER, _POINTER, _COUNT, _INT, _INT, Comm, _POINTER],
    "ncclReduceScatter": [_POINTER, _POINTER, _COUNT, _INT, _INT, Comm, _POINTER],
    "ncclBroadcast": [_POINTER, _POINTER, _COUNT, _INT, _INT, Comm, _POINTER],
    "ncclAllGather": [_POINTER, _POINTER, _COUNT, _INT, Comm, _POINTER],
    "ncclSend": [_POINTER, _COUNT, _INT, _INT, Comm, _POINTER],
    "ncclRecv": [_POINTER, _COUNT, _INT, _INT, Comm, _POINTER],
}
_TEXTS: dict[str, list[Any]] = {"ncclGetErrorString": [_INT], "ncclGetLastError": [Comm]}


class NcclError(RuntimeError):
    """What NCCL says of a call, or of a communicator."""


class Api:
    """The functions of a library, with errors raised. For any number of threads.

    Args:
        library: what has them as attributes. Raises AttributeError where one is missing.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        for names, answer in ((_PARAMETERS, ctypes.c_int), (_TEXTS, ctypes.c_char_p)):
            for name, parameters in names.items():
                function = getattr(library, name)
                function.argtypes, function.restype = parameters, answer

    def version(self) -> tuple[int, int, int]:
        """Major, minor, patch."""
        found = _INT()
        self._call("ncclGetVersion", ctypes.byref(found))
        # Before 2.9 the numbers stood one place further to the right.
        unit = 1_000 if found.value < 10_000 else 10_000
        return found.value // unit, found.value % unit // 100, found.value % 100

    def unique_id(self) -> bytes:
        """A place where the members of a new communicator may meet."""
        made = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return ctypes.string_at(ctypes.addressof(made), ID_BYTES)

    def join(self, where: bytes, size: int, rank: int) -> Comm:
        """A communicator on the thread's device; blocks until all members have come."""
        place, made = UniqueId(), Comm()
        ctypes.memmove(ctypes.addressof(place), where, ID_BYTES)
        self._call("ncclCommInitRank", ctypes.byref(made), size, place, rank)
        return made

    def destroy(self, comm: Comm) -> None:
        """Give it back; waits for what is under way."""
        self._call("ncclCommDestroy", comm)

    def abort(self, comm: Comm) -> None:
        """End what is under way, and give it back."""
        self._call("ncclCommAbort", comm)

    def async_error(self, comm: Comm) -> str:
        """What went wrong behind the calls; nothing where all is well."""
        found = _INT()
        self._call("ncclCommGetAsyncError", comm, ctypes.byref(found))
        if found.value in (SUCCESS, IN_PROGRESS):
            return ""
        return self._text(found.value)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Calls of this thread within the block are one launch; none, if one of them fails."""
        self._call("ncclGroupStart")
        try:
            yield
        except BaseException:
            self._library.ncclGroupEnd()  # says again what has failed, and launches nothing
            raise
        self._call("ncclGroupEnd")

    def all_reduce(self, address: int, count: int, kind: int, comm: Comm, stream: int) -> None:
        """Sum in place."""
        self._call("ncclAllReduce", address, address, count, kind, SUM, comm, stream)

    def reduce_scatter(
        self, out: int, address: int, count: int, kind: int, comm: Comm, stream: int
    ) -> None:
        """`count` elements for each rank."""
        self._call("ncclReduceScatter", address, out, count, kind, SUM, comm, stream)

    def broadcast(
        self, address: int, count: int, kind: int, root: int, comm: Comm, stream: int
    ) -> None:
        """From one rank to all, in place."""
        self._call("ncclBroadcast", address, address, count, kind, root, comm, stream)

    def all_gather(
        self, out: int, address: int, count: int, kind: int, comm: Comm, stream: int
    ) -> None:
        """`count` elements from each rank."""
        self._call("ncclAllGather", address, out, count, kind, comm, stream)

    def send(self, address: int, nbytes: int, peer: int, comm: Comm, stream: int) -> None:
        """To one rank."""
        self._call("ncclSend", address, nbytes, TYPES[torch.int8], peer, comm, stream)

    def receive(self, address: int, nbytes: int, peer: int, comm: Comm, stream: int) -> None:
        """From one rank."""
        self._call("ncclRecv", address, nbytes, TYPES[torch.int8], peer, comm, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != SUCCESS:
            raise NcclError(f"{name}: {self._text(code)}")

    def _text(self, code: int) -> str:
        said = self._library.ncclGetErrorString(code)
        last = self._library.ncclGetLastError(None)
        words = [b"" if text is None else text for text in (said, last)]
        kind, detail = (" ".join(word.decode(errors="replace").split()) for word in words)
        return f"{kind} ({detail})" if detail else kind


@cache
def load() -> Api:
    """Torch's. Raises OSError where there is none."""
    return Api(ctypes.CDLL(NAME))
