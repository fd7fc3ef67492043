"""Argument checks that backends share: communicators, kernels and slot stores.

Every check runs at the call, before any side effect. Checks of communicators raise `Unsupported`
(clauses X5, S2), those of kernels `KernelError` (clause G11), those of slot stores `SlotError`
(clause A8). They look at dtypes, shapes, strides, devices and numbers that the host knows, never at
what a tensor holds: reading that would wait for the device.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import KernelError, SlotError, Unsupported
from equipoise.hal.kernels import Tables, TableUpdate
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing_rules import ReplicaRule, RowHash
from equipoise.hal.slots import Segment, SlotLayout


def check_transferable(
    capabilities: CommunicatorCapabilities, *tensors: Tensor, device: str = "cpu"
) -> None:
    """Check for contiguous tensors of one dtype that can be sent, on a device of that type."""
    for tensor in tensors:
        if tensor.dtype not in capabilities.dtypes:
            raise Unsupported(f"{tensor.dtype} does not travel here")
        if tensor.dtype != tensors[0].dtype:
            raise Unsupported(f"one dtype is needed, got {tensors[0].dtype} and {tensor.dtype}")
        if not tensor.is_contiguous() or tensor.device.type != device:
            raise Unsupported(
                f"a contiguous tensor on {device} is needed, got strides {tensor.stride()} "
                f"of shape {tuple(tensor.shape)} on {tensor.device}"
            )


def check_reducible(
    capabilities: CommunicatorCapabilities, *tensors: Tensor, device: str = "cpu"
) -> None:
    """Movable tensors of a dtype that is also summed."""
    for tensor in tensors:
        if tensor.dtype not in capabilities.reductions:
            raise Unsupported(f"{tensor.dtype} is not summed here")
    check_transferable(capabilities, *tensors, device=device)


def check_shape(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Exactly this shape."""
    if tuple(tensor.shape) != shape:
        raise Unsupported(f"{what} needs shape {shape}, got {tuple(tensor.shape)}")


def check_apart(what: str, out: Tensor, tensor: Tensor) -> None:
    """Two operands without a byte in common: where one is written while the other is read (A3)."""
    first, second = sorted((out, tensor), key=Tensor.data_ptr)
    if first.data_ptr() + first.nbytes > second.data_ptr() and min(first.nbytes, second.nbytes):
        raise Unsupported(f"{what} cannot have its output overlap its input")


def check_rank(what: str, rank: int, ranks: Iterable[int]) -> None:
    """One of these ranks."""
    if rank not in ranks:
        raise Unsupported(f"{what}: rank {rank} is not one of {tuple(ranks)}")


def check_links(links: Iterable[tuple[int, int]], size: int) -> None:
    """Pairs of ranks below `size`."""
    for first, second in links:
        check_rank(f"link {first}-{second}", first, range(size))
        check_rank(f"link {first}-{second}", second, range(size))


def check_members(what: str, where: Rendezvous, members: Sequence[int]) -> None:
    """Different ranks of the run, this one among them."""
    if len(set(members)) != len(members):
        raise Unsupported(f"{what}: a rank comes twice in {tuple(members)}")
    for rank in members:
        check_rank(what, rank, range(where.size))
    check_rank(what, where.rank, members)


def check_rows(what: str, rows: Sequence[int], size: int) -> None:
    """A number of rows for every rank."""
    if len(rows) != size or min(rows) < 0:
        raise Unsupported(f"{what} needs {size} row counts, got {tuple(rows)}")


def check_blob(blob: Tensor) -> None:
    """Contiguous bytes."""
    if blob.dtype != torch.uint8 or blob.ndim != 1 or not blob.is_contiguous():
        raise Unsupported(f"a blob is contiguous uint8 [n], got {blob.dtype} {list(blob.shape)}")


def check_count(ids: Tensor, counts: Tensor) -> None:
    """Operands of `count`."""
    _vector("ids", ids, torch.int32, None, counts.device)
    _vector("counts", counts, torch.int32, None, counts.device)


def check_routing(ids: Tensor, tables: Tables, layer: int, slots: Tensor, counts: Tensor) -> None:
    """Operands that all routing passes have."""
    check_layer(layer, tables)
    device = tables.start.device
    _vector("ids", ids, torch.int32, None, device)
    _vector("slots", slots, torch.int32, ids.shape[0], device)
    _vector("counts", counts, torch.int32, tables.experts, device)


def check_shares(cumulative: Tensor, tables: Tables) -> None:
    """Shares that a pass reads, or the solver writes."""
    _vector("cumulative", cumulative, torch.int32, tables.slots, tables.start.device)


def check_group(group: GroupCounts | None, tables: Tables) -> None:
    """What a levelled pass of a group reads on the device."""
    if group is not None:
        _vector("total", group.total, torch.int32, tables.experts, tables.start.device)
        _vector("before", group.before, torch.int32, tables.experts, tables.start.device)


def check_rule(rule: ReplicaRule, tables: Tables) -> None:
    """What a rule reads on the device."""
    if isinstance(rule, RowHash):
        _vector("rows", rule.rows, torch.int32, 1, tables.start.device)


def check_solve_shares(counts: Tensor, tables: Tables, layer: int, cumulative: Tensor) -> None:
    """Operands of `solve_shares`."""
    check_layer(layer, tables)
    _vector("counts", counts, torch.int64, tables.experts, tables.start.device)
    check_shares(cumulative, tables)


def check_checksum(data: Tensor, out: Tensor) -> None:
    """Operands of `checksum`."""
    if not data.is_contiguous():
        # A copy of it would be taken now, not when the stream comes to it.
        raise KernelError(f"data: expected C-contiguous, got strides {data.stride()}")
    _vector("out", out, torch.int64, 1, out.device)


def check_layer(layer: int, tables: Tables) -> None:
    """A layer that has tables."""
    if not 0 <= layer < tables.layers:
        raise KernelError(f"layer: expected 0 to {tables.layers - 1}, got {layer}")


def check_update(update: TableUpdate, tables: Tables) -> None:
    """New tables that fit the old ones: each layer known and named once."""
    for layer in update.layers:
        check_layer(layer, tables)
    if len(set(update.layers)) < len(update.layers):
        raise KernelError(f"layers: expected each once, got {update.layers}")
    widths = {
        "start": tables.experts + 1,
        "replicas": tables.slots,
        "cumulative": tables.slots,
    }
    for name, width in widths.items():
        part: Tensor = getattr(update, name)
        expected = (len(update.layers), width)
        if part.dtype != torch.int32 or part.shape != expected or part.device.type != "cpu":
            raise KernelError(
                f"{name}: expected int32 {[*expected]} on the host, "
                f"got {part.dtype} {[*part.shape]} on {part.device}"
            )


def copy_update(update: TableUpdate, tables: Tables) -> TableUpdate:
    """A copy of an update that fits: what the caller does with its own from now on is nothing
    to the commit (clause G10)."""
    check_update(update, tables)
    return TableUpdate(
        update.layers,
        update.start.clone(),
        update.replicas.clone(),
        update.cumulative.clone(),
    )


def _vector(
    name: str, tensor: Tensor, dtype: torch.dtype, length: int | None, device: torch.device
) -> None:
    fits = tensor.dtype == dtype and tensor.ndim == 1 and tensor.is_contiguous()
    if fits and tensor.device == device and length in (None, tensor.shape[0]):
        return
    expected = "n" if length is None else length
    raise KernelError(
        f"{name}: expected contiguous {dtype} [{expected}] on {device}, got {tensor.dtype} "
        f"{[*tensor.shape]} of strides {tensor.stride()} on {tensor.device}"
    )


def check_numbers(numbers: Sequence[int], limit: int, what: str) -> tuple[int, ...]:
    """The numbers, each of which is in [0, limit)."""
    for number in numbers:
        if not 0 <= number < limit:
            raise SlotError(f"{what} {number} is not in [0, {limit})")
    return tuple(numbers)


def check_packed_blob(layout: SlotLayout, blob: Tensor, count: int) -> None:
    """Check that a blob holds `count` slots, back to back."""
    size = layout.slot_bytes
    shaped = blob.dtype == torch.uint8 and blob.shape == (count * size,)
    if not shaped or not blob.is_contiguous():
        raise SlotError(
            f"a blob of {count} slots is contiguous uint8 [{count * size}], "
            f"got {blob.dtype} {list(blob.shape)} of strides {blob.stride()}"
        )


def source_segments(layout: SlotLayout, source: Sequence[Tensor]) -> list[Segment]:
    """The tensors of a source as segments that match the slots' descriptor."""
    expected = layout.descriptor
    pairs = zip(expected, source, strict=False)
    segments = [Segment(spec.name, tensor, spec.format) for spec, tensor in pairs]
    types = tuple(segment.type for segment in segments)
    if len(source) != len(expected) or types != expected:
        raise SlotError(f"a source is {types}, the slots are {expected}")
    return segments


def check_checksum_out(out: Tensor, count: int) -> None:
    """Check that the output holds `count` checksums."""
    if out.dtype != torch.int64 or out.shape != (count,):
        raise SlotError(
            f"checksums of {count} slots are int64 [{count}], got {out.dtype} {list(out.shape)}"
        )
