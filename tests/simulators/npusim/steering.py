"""Choosing the schedule of the running process's simulated device."""

import ctypes
import os

LIBRARY = "libascendcl.so"
SEARCHED_LOADED_ONLY = os.RTLD_NOLOAD | os.RTLD_NOW


def steer(schedule: bytes) -> None:
    """From now on the device of this process lets streams move as `schedule` says.

    Each byte is one choice among the streams that can move; after the last one the first of them
    moves. Raises RuntimeError when the process runs on no simulated device.
    """
    _function("npusim_steer")(schedule, len(schedule))


def _function(name: str) -> "ctypes._NamedFuncPointer":
    """A function of the simulated driver that this process has loaded."""
    try:
        library = ctypes.CDLL(LIBRARY, mode=SEARCHED_LOADED_ONLY)
        function = getattr(library, name)
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            "no simulated driver is loaded: run under `python -m npusim` and import torch_npu first"
        ) from error
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    function.restype = None
    return function  # type: ignore[no-any-return]
