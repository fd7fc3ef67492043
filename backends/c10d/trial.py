"""Learns what a library offers by trying each operation on a group of one rank.

`torch.distributed` has no call that says it. One rank needs no peer, so what cannot be done there
with one element is not offered. Operations between two ranks cannot be tried and count as offered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]

from equipoise.backends.c10d.communicator import all_gather_single, reduce_scatter_single
from equipoise.backends.c10d.process_group import close_group, open_group
from equipoise.backends.c10d.work import first_line
from equipoise.hal.capabilities import CommunicatorCapabilities, Operation
from equipoise.hal.errors import BackendUnavailable

TIMEOUT = 30.0
"""Seconds that a try may take."""
DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
Call = Callable[[ProcessGroup, Tensor, Tensor], Any]
"""One operation of a group of one rank; output and input, one element each."""
SUMS: dict[Operation, Call] = {
    Operation.ALL_REDUCE: lambda group, out, tensor: distributed.all_reduce(
        out, group=group, async_op=True
    ),
    Operation.REDUCE_SCATTER: lambda group, out, tensor: reduce_scatter_single(
        out, tensor, group=group, async_op=True
    ),
}
COPIES: dict[Operation, Call] = {
    Operation.ALL_GATHER: lambda group, out, tensor: all_gather_single(
        out, tensor, group=group, async_op=True
    ),
    Operation.BROADCAST: lambda group, out, tensor: distributed.broadcast(
        out, group_src=0, group=group, async_op=True
    ),
    Operation.ALL_TO_ALL: lambda group, out, tensor: distributed.all_to_all_single(
        out, tensor, group=group, async_op=True
    ),
    Operation.ALL_TO_ALL_UNEVEN: lambda group, out, tensor: distributed.all_to_all_single(
        out, tensor, [1], [1], group=group, async_op=True
    ),
}


@dataclass(frozen=True)
class Trial:
    """What one library was found to offer.

    Attributes:
        capabilities: as declared from now on.
        absent: why each operation that is not offered is not, in the library's words.
    """

    capabilities: CommunicatorCapabilities
    absent: dict[Operation, str]


def try_library(backend: str) -> Trial:
    """Try every operation with every dtype. Raises `BackendUnavailable` when there is no group."""
    device = device_type(backend)
    try:
        group = open_group(backend, HashStore(), 0, 1, TIMEOUT, "trial of one rank")
    except Exception as error:
        raise BackendUnavailable(
            f"c10d:{backend} makes no group of one rank: {first_line(error)}"
        ) from error
    try:
        sums, copies = _try_all(group, device, SUMS), _try_all(group, device, COPIES)
        errors = {op: error for op, (_, error) in (sums | copies).items() if error}
        barrier = _error_of(lambda: distributed.barrier(group=group, async_op=True))
        errors |= {Operation.BARRIER: barrier} if barrier else {}
        errors[Operation.CANCEL] = "torch.distributed has no cancel"
        ends_on_abort = _ends_on_abort(group, device)
    finally:
        close_group(group)
    on_host = device == "cpu"
    capabilities = CommunicatorCapabilities(
        operations=frozenset(Operation) - errors.keys(),
        stream_ordered=not on_host,
        independent_groups=on_host,  # c10d asks for one order of all groups on a device
        abort=ends_on_abort,
        shared_devices=on_host,
        dtypes=_common(copies),
        reductions=_common(sums) & _common(copies),
    )
    return Trial(capabilities, errors)


def device_type(backend: str) -> str:
    """The type of device that a backend is tried on: the host, if it has tensors there."""
    types = distributed.Backend.backend_capability.get(backend.lower(), ["cpu"])
    return "cpu" if "cpu" in types else types[0]


def _try_all(
    group: ProcessGroup, device: str, calls: dict[Operation, Call]
) -> dict[Operation, tuple[frozenset[torch.dtype], str]]:
    """For each operation the dtypes that it takes, and its error where it takes none."""
    return {operation: _try(group, device, call) for operation, call in calls.items()}


def _try(group: ProcessGroup, device: str, call: Call) -> tuple[frozenset[torch.dtype], str]:
    errors = {}
    for dtype in DTYPES:
        out, tensor = (torch.zeros(1, device=device).to(dtype) for _ in range(2))
        errors[dtype] = _error_of(lambda: call(group, out, tensor))  # noqa: B023 - called at once
    taken = frozenset(dtype for dtype, error in errors.items() if not error)
    return taken, "" if taken else errors[torch.uint8]


def _error_of(call: Callable[[], Any]) -> str:
    """What a call, or the wait for it, raises; nothing when it ends well."""
    try:
        work = call()
        if work is not None:
            work.wait(timedelta(seconds=TIMEOUT))
    except Exception as error:
        return first_line(error)
    return ""


def _common(tried: dict[Operation, tuple[frozenset[torch.dtype], str]]) -> frozenset[torch.dtype]:
    """The dtypes that every offered operation takes."""
    taken = [dtypes for dtypes, _ in tried.values() if dtypes]
    return frozenset.intersection(*taken) if taken else frozenset()


def _ends_on_abort(group: Any, device: str) -> bool:
    """Whether `abort` does anything: then the group takes no operation any more."""
    try:
        group.abort()
    except Exception:
        return False
    out = torch.zeros(1, dtype=torch.int32, device=device)
    return bool(_error_of(lambda: distributed.all_reduce(out, group=group, async_op=True)))
