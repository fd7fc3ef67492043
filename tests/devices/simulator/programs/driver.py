"""The simulated driver by its C interface, without torch: calls take milliseconds, not seconds."""

import ctypes
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = range(4)
EXTERNAL = 0x20
SIZE = 64
"""Bytes of most allocations here."""

library = ctypes.CDLL("libascendcl.so")
Pointer = ctypes.c_void_p


def call(name: str, *arguments: object) -> int:
    """The code that a C function returns."""
    return int(getattr(library, name)(*arguments))


def do(name: str, *arguments: object) -> None:
    """A call that must succeed."""
    code = call(name, *arguments)
    assert code == 0, (name, code, recent_error())


def recent_error() -> str:
    """What the driver says about the last failure."""
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return str(library.aclGetRecentErrMsg().decode())


def start() -> None:
    """Initialise, and choose device 0."""
    do("aclInit", None)
    do("aclrtSetDevice", 0)


def create(name: str, *arguments: object) -> Pointer:
    """What a function that makes something puts into its first argument."""
    out = Pointer()
    do(name, ctypes.byref(out), *arguments)
    return out


def device_memory(size: int = SIZE) -> Pointer:
    """An allocation on the device."""
    return create("aclrtMalloc", ctypes.c_size_t(size), 0)


def pinned_memory(content: bytes) -> Pointer:
    """Pinned memory that holds `content`."""
    pointer = create("aclrtMallocHost", ctypes.c_size_t(len(content)))
    ctypes.memmove(pointer, content, len(content))
    return pointer


def stream() -> Pointer:
    """A new stream."""
    return create("aclrtCreateStreamWithConfig", 0, 0)


def event(flags: int = 0) -> Pointer:
    """A new event."""
    return create("aclrtCreateEventExWithFlag", flags)


def copy(to: object, source: object, size: int, kind: int) -> int:
    """A copy that blocks; its code."""
    return call("aclrtMemcpy", to, ctypes.c_size_t(size), source, ctypes.c_size_t(size), kind)


def copy_on(on: Pointer, to: object, source: object, size: int, kind: int) -> None:
    """A copy on a stream."""
    sizes = ctypes.c_size_t(size)
    do("aclrtMemcpyAsync", to, sizes, source, sizes, kind, on)


def content(pointer: Pointer, size: int = SIZE) -> bytes:
    """What device memory holds now."""
    out = ctypes.create_string_buffer(size)
    assert copy(out, pointer, size, DEVICE_TO_HOST) == 0, recent_error()
    return out.raw


@contextmanager
def faults() -> Iterator[list[str]]:
    """The faults told inside, kept from the launcher: they are made on purpose."""
    lines: list[str] = []
    launcher_file = os.environ["NPUSIM_FAULTS"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "faults"
        path.touch()
        os.environ["NPUSIM_FAULTS"] = str(path)
        try:
            yield lines
        finally:
            os.environ["NPUSIM_FAULTS"] = launcher_file
            lines += path.read_text(encoding="utf-8").splitlines()


def report(**facts: object) -> None:
    """Print what was found, as one line of JSON."""
    print(json.dumps(facts))
