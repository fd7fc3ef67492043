"""Calls of the simulated driver and of its HCCL, by ctypes, in the terms of `nccl_library`."""

import ctypes
from functools import cache
from typing import Any

DEVICE_TO_DEVICE = 3
_ADDRESS, _COUNT, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32
_ENDS = [_ADDRESS, _ADDRESS]
_HCCL = {
    "HcclGetRootInfo": [_ADDRESS],
    "npusim_join_communicator": [ctypes.c_uint32, _ADDRESS, ctypes.c_uint32, _ADDRESS, _ADDRESS],
    "HcclCommDestroy": [_ADDRESS],
    "npusim_abort_communicator": [_ADDRESS],
    "HcclBatchSendRecv": [_ADDRESS, ctypes.c_uint32, *_ENDS],
    "HcclAllReduce": [_ADDRESS, _ADDRESS, _COUNT, _INT, _INT, *_ENDS],
    "HcclReduceScatter": [_ADDRESS, _ADDRESS, _COUNT, _INT, _INT, *_ENDS],
    "HcclBroadcast": [_ADDRESS, _COUNT, _INT, ctypes.c_uint32, *_ENDS],
    "HcclAllGather": [_ADDRESS, _ADDRESS, _COUNT, _INT, *_ENDS],
}
_ACL = {
    "aclrtGetDevice": [_ADDRESS],
    "aclrtSetDevice": [_INT],
    "aclrtCreateStream": [_ADDRESS],
    "aclrtCreateEventWithFlag": [_ADDRESS, ctypes.c_uint32],
    "aclrtDestroyEvent": [_ADDRESS],
    "aclrtRecordEvent": [_ADDRESS, _ADDRESS],
    "aclrtStreamWaitEvent": [_ADDRESS, _ADDRESS],
    "aclrtQueryEventStatus": [_ADDRESS, _ADDRESS],
    "aclrtMalloc": [_ADDRESS, ctypes.c_size_t, ctypes.c_int],
    "aclrtFree": [_ADDRESS],
    "aclrtMemcpyAsync": [
        _ADDRESS, ctypes.c_size_t, _ADDRESS, ctypes.c_size_t, ctypes.c_int, _ADDRESS
    ],
}  # fmt: skip


class Item(ctypes.Structure):
    """HcclSendRecvItem, by its layout."""

    _fields_ = (
        ("direction", ctypes.c_int32),
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

    def device(self) -> int:
        """The calling thread's."""
        number = ctypes.c_int32()
        self._call("aclrtGetDevice", ctypes.byref(number))
        return number.value

    def use(self, device: int) -> None:
        """Make it the calling thread's."""
        self._call("aclrtSetDevice", device)

    def stream(self) -> int:
        """One that torch_npu knows nothing of."""
        handle = ctypes.c_void_p()
        self._call("aclrtCreateStream", ctypes.byref(handle))
        return int(handle.value or 0)

    def order(self, first: int, then: int) -> None:
        """What comes on one stream behind what another was given."""
        mark = self.mark(first)
        self._call("aclrtStreamWaitEvent", then, mark)
        self.drop(mark)

    def mark(self, stream: int) -> int:
        """An event behind what the stream was given."""
        event = ctypes.c_void_p()
        self._call("aclrtCreateEventWithFlag", ctypes.byref(event), 0)
        self._call("aclrtRecordEvent", event, stream)
        return int(event.value or 0)

    def reached(self, mark: int) -> bool:
        """Whether the device has come there."""
        status = ctypes.c_int()
        self._call("aclrtQueryEventStatus", mark, ctypes.byref(status))
        return bool(status.value)

    def drop(self, mark: int) -> None:
        """Who waits for it keeps it."""
        self._call("aclrtDestroyEvent", mark)

    def copy(self, address: int, nbytes: int, stream: int) -> int:
        """Into memory of its own, on a stream."""
        memory = ctypes.c_void_p()
        self._call("aclrtMalloc", ctypes.byref(memory), nbytes, 0)
        to = int(memory.value or 0)
        self._call("aclrtMemcpyAsync", to, nbytes, address, nbytes, DEVICE_TO_DEVICE, stream)
        return to

    def free(self, address: int) -> None:
        """What `copy` made."""
        self._call("aclrtFree", address)

    def last_error(self) -> bytes:
        """In the driver's words."""
        message = _acl().aclGetRecentErrMsg()
        return message or b""

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(_acl(), name)(*arguments):
            raise RuntimeError(f"{name}: code {code}, {self.last_error().decode()}")


@cache
def _acl() -> Any:
    library = _declared("libascendcl.so", _ACL)
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return library


def _declared(library: str, functions: dict[str, Any]) -> Any:
    handle = ctypes.CDLL(library)
    for name, parameters in functions.items():
        function = getattr(handle, name)
        function.argtypes, function.restype = parameters, ctypes.c_int
    return handle
