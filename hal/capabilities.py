"""What a backend declares about itself before anything is opened.

Every default is the conservative answer: a backend that declares nothing promises only the clauses
that `docs/contract.md` marks as required.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch


class SlotFormat(StrEnum):
    """How the bytes of a slot's segment are laid out."""

    STRIDED = "strided"
    """Contiguous, any byte offset into its storage."""
    PRIVATE = "private"
    """Known to the vendor only (FRACTAL_NZ): offset 0, copied whole between equal segments."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an accelerator can do beyond the required clauses.

    Attributes:
        streams: how many streams run concurrently (1: roles may share one stream).
        stream_lock: `stream_lock()` works.
        copy_independent_of_launch: a copy from the host completes while a launched stream waits;
            false forbids any device wait that depends on a host copy (TensorRT-LLM's first copy
            engine deadlocked there, tech blog 8).
        graph_capture: `graph()` works.
        kernel_capture: its graphs may hold kernels too; false for kernels that read the device
            from the host, as the reference's do.
        pinned_memory: `pinned()` returns page-locked memory, not merely host memory.
        slot_formats: formats that the slot store copies as bytes.
    """

    streams: int = 1
    stream_lock: bool = False
    copy_independent_of_launch: bool = False
    graph_capture: bool = False
    kernel_capture: bool = False
    pinned_memory: bool = False
    slot_formats: frozenset[SlotFormat] = frozenset({SlotFormat.STRIDED})


class Operation(StrEnum):
    """What a communicator may offer; one that is not declared raises `Unsupported` at the call."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    ALL_TO_ALL_UNEVEN = "all_to_all_uneven"
    BARRIER = "barrier"
    POINT_TO_POINT = "point_to_point"
    """`isend` and `irecv`."""
    EXCHANGE = "exchange"
    CANCEL = "cancel"
    """`Work.cancel`."""


@dataclass(frozen=True, kw_only=True)
class CommunicatorCapabilities:
    """What a communicator can do beyond the required clauses.

    Attributes:
        operations: what it offers. All, unless a backend says otherwise: the balancer and the
            pipeline need each of them; only what is judged as it is lacks any.
        stream_ordered: operations are ordered after what was launched on the current stream;
            false: the host must have synchronised the inputs.
        independent_groups: two communicators progress independently of each other.
        abort: `abort()` ends what is in flight.
        rebuild: `rebuild()` works after a rank's death among the survivors.
        shared_devices: two ranks may work on one device (B9).
        dtypes: element types that can be sent; at least bytes for weights, integers for counters.
        reductions: the element types that can be summed.
    """

    operations: frozenset[Operation] = frozenset(Operation)
    stream_ordered: bool = False
    independent_groups: bool = False
    abort: bool = False
    rebuild: bool = False
    shared_devices: bool = False
    dtypes: frozenset[torch.dtype] = frozenset({torch.uint8, torch.int32, torch.int64})
    reductions: frozenset[torch.dtype] = frozenset({torch.int32, torch.int64})


@dataclass(frozen=True)
class Available:
    """The backend can run here; `detail` names the device or library."""

    detail: str


@dataclass(frozen=True)
class Unavailable:
    """The backend cannot run here; `reason` says why and what would help."""

    reason: str


Probe = Available | Unavailable
