"""Checks of what kernels are given; for backends to share.

Every check comes at the call, before anything is launched, and raises `KernelError` (clause G11).
They look at dtypes, shapes, strides, devices and numbers that the host knows, never at what a
tensor holds: that would wait for the device.
"""

import torch
from torch import Tensor

from equipoise.hal.errors import KernelError
from equipoise.hal.kernels import Tables, TableUpdate
from equipoise.hal.routing_rules import RowHash, Rule


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


def check_rule(rule: Rule, tables: Tables) -> None:
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
        due = (len(update.layers), width)
        if part.dtype != torch.int32 or part.shape != due or part.device.type != "cpu":
            raise KernelError(
                f"{name}: expected int32 {[*due]} on the host, "
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
    name: str, given: Tensor, dtype: torch.dtype, length: int | None, device: torch.device
) -> None:
    fits = given.dtype == dtype and given.ndim == 1 and given.is_contiguous()
    if fits and given.device == device and length in (None, given.shape[0]):
        return
    due = "n" if length is None else length
    raise KernelError(
        f"{name}: expected contiguous {dtype} [{due}] on {device}, got {given.dtype} "
        f"{[*given.shape]} of strides {given.stride()} on {given.device}"
    )
