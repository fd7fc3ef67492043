"""The functions of NCCL's C interface that are in use, by ctypes, unchanged since NCCL 2.17.

No tensors here: addresses, counts and streams are numbers.

Communicators are *non-blocking*: a call that would have to wait for other ranks returns
`ncclInProgress`, and NCCL goes on on a thread of its own, also with each launch. Until
`in_progress` is false the communicator takes no other call but an abort.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

import torch

LIBRARY_NAME = "libnccl.so.2"
"""The library that torch has loaded, which the loader finds by this name alone."""
MIN_VERSION = (2, 17)
ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
SUM = 0
NCCL_DTYPES = {
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
NcclCommHandle: TypeAlias = ctypes.c_void_p
"""One of NCCL's communicators."""
MAGIC, LAYOUT = 0xCAFEBEEF, 21700
"""Magic number and layout version of `ncclConfig_t`. The layout is that of 2.17; later versions
only add fields, and accept the shorter struct."""
UNSET = -(1 << 31)
INVALID_RANK = -1
"""Not a rank or dtype: a call with it fails and launches nothing."""


class NcclUniqueId(ctypes.Structure):
    """Where a communicator's members meet; given to NCCL by value."""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class NcclConfig(ctypes.Structure):
    """ncclConfig_t."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    )

    @staticmethod
    def non_blocking(max_ctas: int) -> "NcclConfig":
        """Of a communicator whose kernels take no more multiprocessors than that."""
        return NcclConfig(ctypes.sizeof(NcclConfig), MAGIC, LAYOUT, 0, UNSET, UNSET, max_ctas, None)


_POINTER, _COUNT, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_PARAMETERS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(_INT)],
    "ncclGetUniqueId": [ctypes.POINTER(NcclUniqueId)],
    "ncclCommInitRankConfig": [
        ctypes.POINTER(NcclCommHandle),
        _INT,
        NcclUniqueId,
        _INT,
        ctypes.POINTER(NcclConfig),
    ],
    "ncclCommFinalize": [NcclCommHandle],
    "ncclCommDestroy": [NcclCommHandle],
    "ncclCommAbort": [NcclCommHandle],
    "ncclCommGetAsyncError": [NcclCommHandle, ctypes.POINTER(_INT)],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclAllReduce": [_POINTER, _POINTER, _COUNT, _INT, _INT, NcclCommHandle, _POINTER],
    "ncclReduceScatter": [_POINTER, _POINTER, _COUNT, _INT, _INT, NcclCommHandle, _POINTER],
    "ncclBroadcast": [_POINTER, _POINTER, _COUNT, _INT, _INT, NcclCommHandle, _POINTER],
    "ncclAllGather": [_POINTER, _POINTER, _COUNT, _INT, NcclCommHandle, _POINTER],
    "ncclSend": [_POINTER, _COUNT, _INT, _INT, NcclCommHandle, _POINTER],
    "ncclRecv": [_POINTER, _COUNT, _INT, _INT, NcclCommHandle, _POINTER],
}
_TEXTS: dict[str, list[Any]] = {"ncclGetErrorString": [_INT], "ncclGetLastError": [NcclCommHandle]}


class NcclError(RuntimeError):
    """What NCCL says of a call, or of a communicator."""


class NcclApi:
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
        code = _INT()
        self._call("ncclGetVersion", ctypes.byref(code))
        # Before 2.9 the numbers stood one place further to the right.
        unit = 1_000 if code.value < 10_000 else 10_000
        return code.value // unit, code.value % unit // 100, code.value % 100

    def unique_id(self) -> bytes:
        """A place where the members of a new communicator may meet."""
        identifier = NcclUniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(identifier))
        return ctypes.string_at(ctypes.addressof(identifier), ID_BYTES)

    def join(self, where: bytes, size: int, rank: int, max_ctas: int) -> NcclCommHandle:
        """Begin a communicator on the thread's device; it is in progress until all have come."""
        place, comm, config = NcclUniqueId(), NcclCommHandle(), NcclConfig.non_blocking(max_ctas)
        ctypes.memmove(ctypes.addressof(place), where, ID_BYTES)
        made_at, how = ctypes.byref(comm), ctypes.byref(config)
        self._call("ncclCommInitRankConfig", made_at, size, place, rank, how)
        return comm

    def in_progress(self, comm: NcclCommHandle) -> bool:
        """Whether its last call has not come through yet. Raises `NcclError` if that failed.

        Not for two threads at once: NCCL cleans up after a call in here.
        """
        state = self._state(comm)
        if state not in (SUCCESS, IN_PROGRESS):
            raise NcclError(self._text(state))
        return state == IN_PROGRESS

    def finalize(self, comm: NcclCommHandle) -> None:
        """Begin its end: in progress until all that is under way has come through."""
        self._call("ncclCommFinalize", comm)

    def destroy(self, comm: NcclCommHandle) -> None:
        """Give it back; it was finalized."""
        self._call("ncclCommDestroy", comm)

    def abort(self, comm: NcclCommHandle) -> None:
        """End what is under way, and give it back."""
        self._call("ncclCommAbort", comm)

    def async_error(self, comm: NcclCommHandle) -> str:
        """What went wrong after the calls had returned; nothing where all is well."""
        state = self._state(comm)
        return "" if state in (SUCCESS, IN_PROGRESS) else self._text(state)

    @contextmanager
    def group(self, comm: NcclCommHandle) -> Iterator[None]:
        """Calls of this thread within the block are one launch; none, if the block raises.

        NCCL launches nothing of a group in which a call has failed. It knows nothing of what Python
        raises between two calls, and would launch the half of a round that was called by then: so a
        call that fails is made first. The communicator has failed then.
        """
        self._call("ncclGroupStart")
        try:
            yield
        except BaseException:
            self._library.ncclSend(None, 1, INVALID_RANK, INVALID_RANK, comm, None)
            self._library.ncclGroupEnd()  # says again what has failed, and launches nothing
            raise
        self._call("ncclGroupEnd")

    def all_reduce(
        self, address: int, count: int, kind: int, comm: NcclCommHandle, stream: int
    ) -> None:
        """Sum in place."""
        self._call("ncclAllReduce", address, address, count, kind, SUM, comm, stream)

    def reduce_scatter(
        self, out: int, address: int, count: int, kind: int, comm: NcclCommHandle, stream: int
    ) -> None:
        """`count` elements for each rank."""
        self._call("ncclReduceScatter", address, out, count, kind, SUM, comm, stream)

    def broadcast(
        self, address: int, count: int, kind: int, root: int, comm: NcclCommHandle, stream: int
    ) -> None:
        """From one rank to all, in place."""
        self._call("ncclBroadcast", address, address, count, kind, root, comm, stream)

    def all_gather(
        self, out: int, address: int, count: int, kind: int, comm: NcclCommHandle, stream: int
    ) -> None:
        """`count` elements from each rank."""
        self._call("ncclAllGather", address, out, count, kind, comm, stream)

    def send(self, address: int, nbytes: int, peer: int, comm: NcclCommHandle, stream: int) -> None:
        """To one rank."""
        self._call("ncclSend", address, nbytes, NCCL_DTYPES[torch.int8], peer, comm, stream)

    def receive(
        self, address: int, nbytes: int, peer: int, comm: NcclCommHandle, stream: int
    ) -> None:
        """From one rank."""
        self._call("ncclRecv", address, nbytes, NCCL_DTYPES[torch.int8], peer, comm, stream)

    def _state(self, comm: NcclCommHandle) -> int:
        state = _INT()
        self._call("ncclCommGetAsyncError", comm, ctypes.byref(state))
        return state.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code not in (SUCCESS, IN_PROGRESS):
            raise NcclError(f"{name}: {self._text(code)}")

    def _text(self, code: int) -> str:
        message = self._library.ncclGetErrorString(code)
        last = self._library.ncclGetLastError(None)
        words = [b"" if text is None else text for text in (message, last)]
        kind, detail = (" ".join(word.decode(errors="replace").split()) for word in words)
        return f"{kind} ({detail})" if detail else kind


@cache
def load() -> NcclApi:
    """Torch's. Raises OSError where there is none."""
    return NcclApi(ctypes.CDLL(LIBRARY_NAME))
