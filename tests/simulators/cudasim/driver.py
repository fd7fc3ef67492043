"""Stream memory operations, by the names of cuda.bindings.driver, on the simulated device."""

import ctypes
from enum import IntEnum
from functools import cache
from typing import Any

LIBRARY = "libascendcl.so"


class CUresult(IntEnum):
    """What calls return first."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_UNKNOWN = 999


class CUstreamWaitValue_flags(IntEnum):
    """How a word is compared."""

    CU_STREAM_WAIT_VALUE_EQ = 1


class CUstreamWriteValue_flags(IntEnum):
    """How a word is written."""

    CU_STREAM_WRITE_VALUE_DEFAULT = 0


class CUstreamCaptureMode(IntEnum):
    """What a thread that captures may do; the simulated driver's own functions do not ask."""

    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


def CUstream(handle: int) -> int:
    """A stream is its number."""
    return handle


def cuThreadExchangeStreamCaptureMode(mode: int) -> tuple[CUresult, int]:
    """The mode before."""
    return CUresult.CUDA_SUCCESS, CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def cuCtxGetCurrent() -> tuple[CUresult, int]:
    """Every thread has one."""
    return CUresult.CUDA_SUCCESS, 1


def cuMemHostGetDevicePointer(address: int, flags: int) -> tuple[CUresult, int]:
    """Where the device finds it: at the same place, as with one address space for both."""
    return CUresult.CUDA_SUCCESS, address


def cuStreamWaitValue32(stream: int, address: int, value: int, flags: int) -> tuple[CUresult]:
    """The stream stands until the word has the value."""
    assert flags == CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    return _call("npusim_wait_word", stream, address, value)


def cuStreamWriteValue32(stream: int, address: int, value: int, flags: int) -> tuple[CUresult]:
    """The stream writes it in its turn."""
    return _call("npusim_write_word", stream, address, value)


def _call(name: str, stream: int, address: int, value: int) -> tuple[CUresult]:
    code = _function(name)(address, value, stream)
    return (CUresult.CUDA_ERROR_UNKNOWN if code else CUresult.CUDA_SUCCESS,)


@cache
def _function(name: str) -> Any:
    function = getattr(ctypes.CDLL(LIBRARY), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function
