"""Learns what a communication library offers by trying each operation on a group of one rank.

Libraries have no call that says it. One rank needs no peer, so what cannot be done there with one
element is not offered. Operations between two ranks cannot be tried and count as offered.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from equipoise.hal.capabilities import CommunicatorCapabilities, Operation
from equipoise.hal.communicator import Communicator
from equipoise.hal.work import Work

TIMEOUT = 30.0
"""Seconds that a try may take."""
OUTCOME = "EQUIPOISE_LIBRARY_TRIAL_"
"""What the variables that hold the outcomes begin with; the name of the library follows."""
DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
UNTRIED = CommunicatorCapabilities(
    abort=True, dtypes=frozenset(DTYPES), reductions=frozenset(DTYPES)
)
"""What a communicator declares while it is tried: everything."""
Call = Callable[[Communicator, torch.Tensor, torch.Tensor], Work]
"""One operation of a group of one rank; output and input are [1, 1]."""
SUMS: Mapping[Operation, Call] = {
    Operation.ALL_REDUCE: lambda alone, out, tensor: alone.all_reduce(out),
    Operation.REDUCE_SCATTER: lambda alone, out, tensor: alone.reduce_scatter(out[0], tensor),
}
COPIES: Mapping[Operation, Call] = {
    Operation.ALL_GATHER: lambda alone, out, tensor: alone.all_gather(out, tensor[0]),
    Operation.BROADCAST: lambda alone, out, tensor: alone.broadcast(out, 0),
    Operation.ALL_TO_ALL: lambda alone, out, tensor: alone.all_to_all(out, tensor),
    Operation.ALL_TO_ALL_UNEVEN: lambda alone, out, tensor: alone.all_to_all_uneven(
        out, tensor, [1], [1]
    ),
}


@dataclass(frozen=True)
class Trial:
    """What one library was found to offer.

    Attributes:
        device: the type of device that it was tried on.
        absent: why each operation that is not offered is not, in the library's words.
        abort: whether `abort` of a communicator does anything.
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
        """What is declared: what was found, and what these libraries promise on hosts and devices.

        On a device they follow the current stream, and ask for one order of all groups.
        """
        on_host = self.device == "cpu"
        return CommunicatorCapabilities(
            operations=frozenset(Operation) - self.absent.keys(),
            stream_ordered=not on_host,
            independent_groups=on_host,
            abort=self.abort,
            shared_devices=on_host,
            dtypes=self.dtypes,
            reductions=self.reductions,
        )


OpenAlone = Callable[[int], Communicator]
"""Opens a communicator of one rank that declares `UNTRIED`; gets the number of the try."""


def trial_of(library: str, device: str, open_alone: OpenAlone) -> Trial:
    """The trial of a library, made once by the first process of a run.

    The processes that it starts find the outcome in their environment: ranks must not differ in
    what they declare, and a library whose every group is a process takes half a minute to try.

    Raises what `open_alone` raises.
    """
    key = OUTCOME + "".join(c if c.isalnum() else "_" for c in library).upper()
    if key not in os.environ:
        os.environ[key] = _to_json(try_library(device, open_alone))
    return _from_json(os.environ[key])


def try_library(device: str, open_alone: OpenAlone) -> Trial:
    """Try every operation with every dtype. Raises what `open_alone` raises."""
    group = _TrialGroup(open_alone)
    try:
        sums, copies = _try_all(group, device, SUMS), _try_all(group, device, COPIES)
        absent = {op: error for op, (_, error) in (sums | copies).items() if error}
        barrier = group.error_of(lambda alone: alone.barrier())
        absent |= {Operation.BARRIER: barrier} if barrier else {}
        absent[Operation.CANCEL] = "the library has no call that cancels an operation"
        ends_on_abort = group.ends_on_abort(device)
    finally:
        group.close()
    copied = _common(copies) or _common(sums)  # a library may have no more than a sum
    return Trial(device, absent, ends_on_abort, copied, _common(sums) & copied)


class _TrialGroup:
    """A group of one rank; a new one after each failure, which may have spoilt the one before."""

    def __init__(self, open_alone: OpenAlone) -> None:
        self._open_alone = open_alone
        self._opened = 0
        self._alone = self._open()

    def error_of(self, call: Callable[[Communicator], Work]) -> str:
        """What a call, or the wait for it, raises; nothing when it ends well."""
        try:
            call(self._alone).result(TIMEOUT)
        except Exception as error:
            self.close()
            self._alone = self._open()
            return str(error)
        return ""

    def ends_on_abort(self, device: str) -> bool:
        """Whether `abort` does anything: then no operation is taken any more."""
        try:
            self._alone.abort()
        except Exception:
            return False
        out = torch.zeros(1, dtype=torch.int32, device=device)
        return bool(self.error_of(lambda alone: alone.all_reduce(out)))

    def close(self) -> None:
        """Close it, if it can be: one that has failed may refuse."""
        with suppress(Exception):
            self._alone.close()

    def _open(self) -> Communicator:
        self._opened += 1
        return self._open_alone(self._opened)


def _try_all(
    group: _TrialGroup, device: str, calls: Mapping[Operation, Call]
) -> dict[Operation, tuple[frozenset[torch.dtype], str]]:
    """For each operation the dtypes that it takes, and its error where it takes none."""
    return {operation: _try(group, device, call) for operation, call in calls.items()}


def _try(group: _TrialGroup, device: str, call: Call) -> tuple[frozenset[torch.dtype], str]:
    errors = {}
    for dtype in DTYPES:
        out, tensor = (torch.zeros(1, 1, device=device).to(dtype) for _ in range(2))
        errors[dtype] = group.error_of(partial(_call, call, out, tensor))
    accepted = frozenset(dtype for dtype, error in errors.items() if not error)
    return accepted, "" if accepted else errors[torch.uint8]


def _call(call: Call, out: torch.Tensor, tensor: torch.Tensor, alone: Communicator) -> Work:
    return call(alone, out, tensor)


def _common(
    tried: Mapping[Operation, tuple[frozenset[torch.dtype], str]],
) -> frozenset[torch.dtype]:
    """The dtypes that every offered operation takes."""
    accepted = [dtypes for dtypes, _ in tried.values() if dtypes]
    return frozenset.intersection(*accepted) if accepted else frozenset()


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
