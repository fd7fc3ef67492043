"""Learns what a library offers by trying each operation on a group of one rank.

`torch.distributed` has no call that says it. One rank needs no peer, so what cannot be done there
with one element is not offered. Operations between two ranks cannot be tried and count as offered.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import HashStore, PrefixStore, ProcessGroup  # type: ignore[attr-defined]

from equipoise.backends.c10d.communicator import all_gather_single, reduce_scatter_single
from equipoise.backends.c10d.process_group import close_group, open_group
from equipoise.backends.c10d.work import first_line
from equipoise.hal.capabilities import CommunicatorCapabilities, Operation
from equipoise.hal.errors import BackendUnavailable

OUTCOME = "EQUIPOISE_TRIAL_OF_C10D_"
"""What the variables that hold the outcomes begin with; the name of the backend follows."""
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
        device: the type of device that it was tried on.
        absent: why each operation that is not offered is not, in the library's words.
        abort: whether `abort` of a group does anything.
        dtypes: what every operation that copies takes.
        reductions: what every sum takes as well.
    """

    device: str
    absent: Mapping[Operation, str]
    abort: bool
    dtypes: frozenset[torch.dtype]
    reductions: frozenset[torch.dtype]

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What is declared: what was found, and what c10d documents of hosts and devices."""
        on_host = self.device == "cpu"
        return CommunicatorCapabilities(
            operations=frozenset(Operation) - self.absent.keys(),
            stream_ordered=not on_host,
            independent_groups=on_host,  # c10d asks for one order of all groups on a device
            abort=self.abort,
            shared_devices=on_host,
            dtypes=self.dtypes,
            reductions=self.reductions,
        )


def trial_of(backend: str) -> Trial:
    """The trial of a library, made once by the first process of a run.

    The processes that it starts find the outcome in their environment: ranks must not differ in
    what they declare, and a library whose every group is a process takes half a minute to try.

    Raises `BackendUnavailable` when the library makes no group.
    """
    key = f"{OUTCOME}{backend.upper()}"
    if key not in os.environ:
        os.environ[key] = _to_json(try_library(backend))
    return _from_json(os.environ[key])


def try_library(backend: str) -> Trial:
    """Try every operation with every dtype. Raises `BackendUnavailable` when there is no group."""
    device, group = device_type(backend), _TrialGroup(backend)
    try:
        sums, copies = _try_all(group, device, SUMS), _try_all(group, device, COPIES)
        errors = {op: error for op, (_, error) in (sums | copies).items() if error}
        barrier = group.error_of(lambda one: distributed.barrier(group=one, async_op=True))
        errors |= {Operation.BARRIER: barrier} if barrier else {}
        errors[Operation.CANCEL] = "torch.distributed has no cancel"
        ends_on_abort = group.ends_on_abort(device)
    finally:
        group.close()
    taken = _common(copies)
    return Trial(device, errors, ends_on_abort, taken, _common(sums) & taken)


class _TrialGroup:
    """A group of one rank; a new one after each failure, which may have spoilt the one before."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._store = HashStore()
        self._made = 0
        self._group = self._make()

    def error_of(self, call: Callable[[ProcessGroup], Any]) -> str:
        """What a call, or the wait for it, raises; nothing when it ends well."""
        try:
            work = call(self._group)
            if work is not None:
                work.wait(timedelta(seconds=TIMEOUT))
        except Exception as error:
            self.close()
            self._group = self._make()
            return first_line(error)
        return ""

    def ends_on_abort(self, device: str) -> bool:
        """Whether `abort` does anything: then the group takes no operation any more."""
        group: Any = self._group
        try:
            group.abort()
        except Exception:
            return False
        out = torch.zeros(1, dtype=torch.int32, device=device)
        return bool(
            self.error_of(lambda one: distributed.all_reduce(out, group=one, async_op=True))
        )

    def close(self) -> None:
        """Destroy it, if it can be: one that has failed may refuse."""
        with suppress(Exception):
            close_group(self._group)

    def _make(self) -> ProcessGroup:
        self._made += 1
        store = PrefixStore(str(self._made), self._store)
        try:
            return open_group(self._backend, store, 0, 1, TIMEOUT, f"trial {self._made}")
        except Exception as error:
            raise BackendUnavailable(
                f"c10d:{self._backend} makes no group of one rank: {first_line(error)}"
            ) from error


def device_type(backend: str) -> str:
    """The type of device that a backend is tried on: the host, if it has tensors there."""
    types = distributed.Backend.backend_capability.get(backend.lower(), ["cpu"])
    return "cpu" if "cpu" in types else types[0]


def _try_all(
    group: _TrialGroup, device: str, calls: dict[Operation, Call]
) -> dict[Operation, tuple[frozenset[torch.dtype], str]]:
    """For each operation the dtypes that it takes, and its error where it takes none."""
    return {operation: _try(group, device, call) for operation, call in calls.items()}


def _try(group: _TrialGroup, device: str, call: Call) -> tuple[frozenset[torch.dtype], str]:
    errors = {}
    for dtype in DTYPES:
        out, tensor = (torch.zeros(1, device=device).to(dtype) for _ in range(2))
        errors[dtype] = group.error_of(partial(_call, call, out, tensor))
    taken = frozenset(dtype for dtype, error in errors.items() if not error)
    return taken, "" if taken else errors[torch.uint8]


def _call(call: Call, out: Tensor, tensor: Tensor, group: ProcessGroup) -> Any:
    return call(group, out, tensor)


def _common(tried: dict[Operation, tuple[frozenset[torch.dtype], str]]) -> frozenset[torch.dtype]:
    """The dtypes that every offered operation takes."""
    taken = [dtypes for dtypes, _ in tried.values() if dtypes]
    return frozenset.intersection(*taken) if taken else frozenset()


def _to_json(trial: Trial) -> str:
    def names(dtypes: frozenset[torch.dtype]) -> list[str]:
        return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)

    outcome = {"device": trial.device, "absent": dict(trial.absent), "abort": trial.abort}
    return json.dumps(
        outcome | {"dtypes": names(trial.dtypes), "reductions": names(trial.reductions)}
    )


def _from_json(text: str) -> Trial:
    outcome = json.loads(text)
    absent = {Operation(name): why for name, why in outcome["absent"].items()}
    dtypes, reductions = (
        frozenset(getattr(torch, name) for name in outcome[key]) for key in ("dtypes", "reductions")
    )
    return Trial(outcome["device"], absent, outcome["abort"], dtypes, reductions)
