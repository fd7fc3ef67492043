"""Calls of the simulated driver and of its HCCL, by ctypes, in the terms of `nccl_library`."""

import ctypes
import threading
from functools import cache
from typing import Any

NOT_YET, WRITTEN, TAKEN = 0, 1, 2
"""A word: what is behind the curtain has not come there; has; and the lane has gone on."""
LINE = 64
PAGE = 256
DEVICE_TO_DEVICE = 3
_ADDRESS, _COUNT, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32
_ENDS = [_ADDRESS, _ADDRESS]
_HCCL = {
    "HcclGetRootInfo": [_ADDRESS],
    "HcclCommInitRootInfo": [ctypes.c_uint32, _ADDRESS, ctypes.c_uint32, _ADDRESS],
    "HcclCommDestroy": [_ADDRESS],
    "HcclBatchSendRecv": [_ADDRESS, ctypes.c_uint32, *_ENDS],
    "HcclAllReduce": [_ADDRESS, _ADDRESS, _COUNT, _INT, _INT, *_ENDS],
    "HcclReduceScatter": [_ADDRESS, _ADDRESS, _COUNT, _INT, _INT, *_ENDS],
    "HcclBroadcast": [_ADDRESS, _COUNT, _INT, ctypes.c_uint32, *_ENDS],
    "HcclAllGather": [_ADDRESS, _ADDRESS, _COUNT, _INT, *_ENDS],
}
_ACL = {
    "aclrtCreateStream": [_ADDRESS],
    "aclrtDestroyStream": [_ADDRESS],
    "aclrtCreateEventWithFlag": [_ADDRESS, ctypes.c_uint32],
    "aclrtDestroyEvent": [_ADDRESS],
    "aclrtRecordEvent": [_ADDRESS, _ADDRESS],
    "aclrtStreamWaitEvent": [_ADDRESS, _ADDRESS],
    "aclrtStreamQuery": [_ADDRESS, _ADDRESS],
    "aclrtMalloc": [_ADDRESS, ctypes.c_size_t, ctypes.c_int],
    "aclrtMallocHost": [_ADDRESS, ctypes.c_size_t],
    "aclrtFree": [_ADDRESS],
    "aclrtMemcpyAsync": [
        _ADDRESS, ctypes.c_size_t, _ADDRESS, ctypes.c_size_t, ctypes.c_int, _ADDRESS
    ],
    "npusim_wait_word": [_ADDRESS, ctypes.c_uint32, _ADDRESS],
    "npusim_write_word": [_ADDRESS, ctypes.c_uint32, _ADDRESS],
}  # fmt: skip


class Item(ctypes.Structure):
    """HcclSendRecvItem, by its layout."""

    _fields_ = (
        ("way", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("peer", ctypes.c_uint32),
    )


@cache
def hccl() -> Any:
    """The simulated HCCL."""
    return _declared("libhccl.so", _HCCL)


class Acl:
    """The simulated driver; calls that must not fail raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[int] = []

    def stream(self) -> int:
        """One that torch_npu knows nothing of."""
        made = ctypes.c_void_p()
        self._call("aclrtCreateStream", ctypes.byref(made))
        return int(made.value or 0)

    def drop(self, stream: int) -> None:
        """Give one back on which nothing is under way."""
        self._call("aclrtDestroyStream", stream)

    def order(self, first: int, then: int) -> None:
        """What comes on one stream behind what another was given."""
        event = ctypes.c_void_p()
        self._call("aclrtCreateEventWithFlag", ctypes.byref(event), 0)
        self._call("aclrtRecordEvent", event, first)
        self._call("aclrtStreamWaitEvent", then, event)
        self._call("aclrtDestroyEvent", event)

    def copy(self, address: int, nbytes: int, stream: int) -> int:
        """Into memory of its own, on a stream."""
        made = ctypes.c_void_p()
        self._call("aclrtMalloc", ctypes.byref(made), nbytes, 0)
        to = int(made.value or 0)
        self._call("aclrtMemcpyAsync", to, nbytes, address, nbytes, DEVICE_TO_DEVICE, stream)
        return to

    def free(self, address: int) -> None:
        """What `copy` made."""
        self._call("aclrtFree", address)

    def failed(self, stream: int) -> bool:
        """Whether it has an error."""
        status = ctypes.c_int()
        return bool(_acl().aclrtStreamQuery(stream, ctypes.byref(status)))

    def word(self) -> Any:
        """A word that is not written."""
        with self._lock:
            if not self._spare:
                page = ctypes.c_void_p()
                self._call("aclrtMallocHost", ctypes.byref(page), LINE * PAGE)
                begin = int(page.value or 0)
                self._spare = [begin + LINE * place for place in range(PAGE)]
            return self.fresh(ctypes.c_uint32.from_address(self._spare.pop()))

    def fresh(self, word: Any) -> Any:
        """The same, not written."""
        word.value = NOT_YET
        return word

    def write(self, word: Any, stream: int) -> None:
        """A stream writes it."""
        self._call("npusim_write_word", ctypes.addressof(word), WRITTEN, stream)

    def wait(self, word: Any, stream: int) -> None:
        """A stream waits for it, and takes it."""
        self._call("npusim_wait_word", ctypes.addressof(word), WRITTEN, stream)
        self._call("npusim_write_word", ctypes.addressof(word), TAKEN, stream)

    def store(self, word: Any) -> None:
        """The host writes it."""
        word.value = WRITTEN

    def written(self, word: Any) -> bool:
        """Whether it was."""
        return bool(word.value != NOT_YET)

    def taken(self, word: Any) -> bool:
        """Whether the stream that waited has gone on."""
        return bool(word.value == TAKEN)

    def last_error(self) -> bytes:
        """In the driver's words."""
        said = _acl().aclGetRecentErrMsg()
        return said or b""

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(_acl(), name)(*arguments):
            raise RuntimeError(f"{name}: code {code}, {self.last_error().decode()}")


@cache
def _acl() -> Any:
    made = _declared("libascendcl.so", _ACL)
    made.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return made


def _declared(library: str, functions: dict[str, Any]) -> Any:
    made = ctypes.CDLL(library)
    for name, parameters in functions.items():
        function = getattr(made, name)
        function.argtypes, function.restype = parameters, ctypes.c_int
    return made
