"""Reports the device memory that balancing takes, at the start."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum

import torch
from torch import Tensor

from equipoise.balancer.experts.placement import ExpertShape
from equipoise.balancer.experts.weights.expert_weights import ExpertModel
from equipoise.hal.accelerator import EstimatesRoutingMemory
from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.kernels import Tables

HEADER = ("what", "bytes", "why")
COUNTER_BYTES = 4 + 8
"""Per expert of a layer: rows in the open sub-window, and their sum during the all-reduce."""

BACKEND_TABLES = "routing tables of the backend"


class RoundOrder(StrEnum):
    """How the rounds of a chunk are issued, which determines how much is packed at once."""

    IN_TURN = "in turn"
    """Each round as soon as the previous one has arrived."""
    ALL_AT_ONCE = "at once"
    """The thread that issues all other operations issues all rounds (P4)."""

    @staticmethod
    def of_communicator(capabilities: CommunicatorCapabilities) -> "RoundOrder":
        """Returns the order that communicators with these capabilities allow."""
        return RoundOrder.IN_TURN if capabilities.independent_groups else RoundOrder.ALL_AT_ONCE


@dataclass(frozen=True)
class MemoryItem:
    """Memory of one kind; `nbytes` on one rank, or None if unknown."""

    name: str
    nbytes: int | None
    reason: str

    def __post_init__(self) -> None:
        if self.nbytes is not None and self.nbytes < 0:
            raise ValueError(f"{self.name} cannot take {self.nbytes} bytes")

    @property
    def figure(self) -> str:
        """Bytes as printed."""
        return "unknown" if self.nbytes is None else f"{self.nbytes:,}"


@dataclass(frozen=True)
class MemoryReport:
    """Items in the order in which they are printed; reports can be added."""

    items: tuple[MemoryItem, ...] = ()

    @property
    def total(self) -> int:
        """Sum of the known bytes of all items."""
        return sum(entry.nbytes or 0 for entry in self.items)

    def __add__(self, other: "MemoryReport") -> "MemoryReport":
        return MemoryReport(self.items + other.items)

    def __str__(self) -> str:
        rows = [HEADER, *((e.name, e.figure, e.reason) for e in self.items)]
        unknown = any(entry.nbytes is None for entry in self.items)
        rows.append(("total", f"{self.total:,}", "at least" if unknown else ""))
        first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(f"{a:<{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in rows)


def memory_report(
    model: ExpertModel,
    ranks: int,
    staging: Sequence[int],
    slots_per_message: int,
    rounds: RoundOrder = RoundOrder.IN_TURN,
    device: object = None,
) -> MemoryReport:
    """Builds the report of one model on one rank: slots, staging, messages, tables, counters.

    Args:
        model: the registered model.
        ranks: number of ranks over which its experts are spread.
        staging: staging buffers of each layer group; 0 on the in-place path.
        slots_per_message: maximum number of slots in one message.
        rounds: how the rounds of a chunk are issued.
        device: an accelerator or its backend, which may report further memory for routing.

    Raises:
        PlacementError: the slots of these ranks cannot hold the experts.
        ValueError: `staging` does not have one number per layer group.
    """
    shape = model.shape(ranks)
    if len(staging) != len(model.groups):
        raise ValueError(f"{len(staging)} numbers of staging for {len(model.groups)} layer groups")
    entries = [_slots(model, shape)]
    for number, (group, buffers) in enumerate(zip(model.groups, staging, strict=True)):
        name = f"{model.name}: staging of layer group {number}"
        reason = f"{buffers} buffers of {group.slot_bytes:,} bytes, where weights arrive"
        entries.append(MemoryItem(name, group.slot_bytes * buffers, reason))
        slots = model.slots_per_rank * len(group.layers)
        name = f"{model.name}: messages of layer group {number}"
        packed = group.slot_bytes * packed_slots(buffers, slots, slots_per_message, rounds)
        entries.append(MemoryItem(name, packed, packed_reason(rounds)))
    reason = f"two sets for {shape.layers} layers x {shape.slots} slots of all ranks"
    entries.append(MemoryItem(f"{model.name}: routing tables", tables_bytes(shape), reason))
    of_groups = [replace(shape, layers=len(group.layers)) for group in model.groups]
    entries += backend_tables(device, of_groups, f"{model.name}: ")
    counted = shape.layers * shape.experts * COUNTER_BYTES
    entries.append(
        MemoryItem(f"{model.name}: load counters", counted, "rows by expert, and their sum")
    )
    return MemoryReport(tuple(entries))


def packed_slots(staging: int, slots: int, slots_per_message: int, rounds: RoundOrder) -> int:
    """Returns how many slots are packed on one rank at once, both sent and received.

    Args:
        staging: staging buffers; without any, nothing is sent.
        slots: slots that the rank holds.
        slots_per_message: maximum number of slots in one message.
        rounds: how the rounds of a chunk are issued. With `ALL_AT_ONCE` at most as much is received
            as can be staged; how much is sent depends on plans, and is assumed to be the same.
    """
    if rounds is RoundOrder.ALL_AT_ONCE:
        return 2 * staging
    return 2 * min(slots_per_message, slots) if staging else 0


def packed_reason(rounds: RoundOrder) -> str:
    """Describes what `packed_slots` counts."""
    if rounds is RoundOrder.ALL_AT_ONCE:
        return "sent and received, in all rounds of the chunks in flight at once"
    return "sent and received, in one round"


def tables_bytes(shape: ExpertShape) -> int:
    """Bytes of `equipoise.hal.kernels.Tables` for a shape."""
    # Made on the meta device, which stores nothing: so the figure is that of the tables themselves,
    # without a second formula.
    nowhere = torch.device("meta")
    tables = Tables.empty(shape.layers, shape.experts, shape.slots, shape.ranks, nowhere)
    values = (getattr(tables, field.name) for field in fields(tables))
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def backend_tables(
    device: object, shapes: Sequence[ExpertShape], prefix: str = ""
) -> list[MemoryItem]:
    """Reports what the kernels of a backend keep in addition to `Tables` of these shapes.

    Empty if the backend does not estimate it.

    Args:
        device: an accelerator or its backend; nothing is opened.
        shapes: one for each `Tables`.
        prefix: prefix of the item's name.
    """
    if not isinstance(device, EstimatesRoutingMemory):
        return []
    nbytes = sum(device.routing_bytes(each.layers, each.experts, each.slots) for each in shapes)
    return [MemoryItem(prefix + BACKEND_TABLES, nbytes, "replicas as its kernels look them up")]


def _slots(model: ExpertModel, shape: ExpertShape) -> MemoryItem:
    spare = shape.slots - shape.experts
    reason = (
        f"the model's own weights in {model.layers} layers x {model.slots_per_rank} slots; "
        f"{spare} of {shape.slots} slots a layer, over all ranks, are spare"
    )
    return MemoryItem(f"{model.name}: slots", model.nbytes, reason)
