"""Launches the Triton kernels on the streams of the contract, with their workspaces."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from equipoise.backends.devices.memory import HOST_TYPE, copy, pack_table_update, record_stream_use
from equipoise.backends.devices.runtime import Device
from equipoise.backends.devices.stream import DeviceStream, own_stream
from equipoise.hal.kernels import Kernels, Salt, Tables, TableUpdate
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing_rules import ReplicaRule, RowHash
from equipoise.hal.stream import Stream
from equipoise.hal.support.validation import (
    check_checksum,
    check_count,
    check_group,
    check_routing,
    check_rule,
    check_shares,
    check_solve_shares,
    check_update,
)

if TYPE_CHECKING:
    from equipoise.backends.cuda.kernels.workspace import Sizes, Workspace

PACKAGE = "equipoise.backends.cuda.kernels"
WORKSPACE_STREAM = "aside"
"""Use of the cached stream that workspaces are made on. Never a stream that may be captured:
zeroing a workspace would become part of the graph."""
MIN_ELEMENTS = 1 << 17
"""Minimum elements of a workspace for routing by quotas, or levelled: 16,384 tokens of eight
experts. Larger ones are powers of two; so a captured graph rarely meets a size that has to be
allocated."""


@cache
def kernel_module(module: str) -> Any:
    """One of the modules with kernels; the first of them imports Triton."""
    return import_module(f"{PACKAGE}.{module}")


class DeviceKernels(Kernels, Protocol):
    """The kernels of the contract, and one more that the slots use."""

    def checksum_parts(self, parts: Sequence[Tensor], out: Tensor, stream: Stream) -> None:
        """Checksum of parts back to back, uint8 [n] each, into `out`, int64 [1]; called by a
        program."""
        ...


class Workspaces:
    """A workspace per stream and size, and one per capture: a graph may run in parallel with the
    stream that it was captured on."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._by_stream: WeakKeyDictionary[object, dict[Sizes, Workspace]] = WeakKeyDictionary()

    def get(self, stream: DeviceStream, sizes: "Sizes") -> "Workspace":
        """The workspace for a program of the stream. It is made on another stream: on this one the
        making would become part of a graph, or synchronise a stream that is being captured."""
        by_sizes = self._by_stream.setdefault(stream.launch_target, {})
        if sizes not in by_sizes:
            device = self._device
            runtime = device.runtime
            with (
                runtime.allowed_in_capture(),
                runtime.current(device.cached_stream(WORKSPACE_STREAM)),
            ):
                workspace = kernel_module("workspace").Workspace.make(sizes, device.torch)
            by_sizes[sizes] = workspace
            # Its memory belongs to the workspace stream: a dropped workspace may still be in use
            # here.
            record_stream_use(stream, *workspace.tensors)
        stream.keep_alive(by_sizes[sizes])
        return by_sizes[sizes]


class CudaKernels:
    """Triton's kernels of one device; the contract's values bit for bit.

    A kernel is compiled with its first launch, which takes a second or so; `warm` does that ahead.
    Raises what Triton raises where one cannot be compiled; the stream has failed then.
    """

    levels_on_device = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self._workspaces = Workspaces(device)

    def warm(self, tables: Tables, stream: Stream) -> None:
        """Compile every kernel, by launching it on scratch tables, which are awaited."""
        own = own_stream(stream)

        def program() -> None:
            space = self._workspaces.get(own, _sizes_of(tables))
            kernel_module("warmup").warm(tables, space)
            self._workspaces.get(own, _sizes(tables.experts, tables.experts, 1))
            self._workspaces.get(own, _sizes(1, 1, 1))

        own.launch(program)

    def count(self, ids: Tensor, counts: Tensor, stream: Stream) -> None:
        """Tokens per expert."""
        check_count(ids, counts)
        sizes = _sizes(counts.numel(), counts.numel(), 1)

        def program(space: "Workspace") -> None:
            record_stream_use(stream, ids, counts)
            kernel_module("counting").count(ids, counts, space)

        self._launch(stream, sizes, program)

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        """Route by the hash of each token's place."""
        check_routing(ids, tables, salt.layer, slots, counts)

        def program(space: "Workspace") -> None:
            record_stream_use(stream, ids, slots, counts)
            kernel_module("hash_routing").route_hashed(ids, tables, salt, slots, counts, space)

        self._launch(stream, _sizes_of(tables), program)

    def route_apportioned(
        self,
        ids: Tensor,
        tables: Tables,
        cumulative: Tensor,
        salt: Salt,
        slots: Tensor,
        counts: Tensor,
        stream: Stream,
    ) -> None:
        """Route by integer quotas of this batch."""
        check_routing(ids, tables, salt.layer, slots, counts)
        check_shares(cumulative, tables)

        def program(space: "Workspace") -> None:
            record_stream_use(stream, ids, cumulative, slots, counts)
            route = kernel_module("quota_routing").route_apportioned
            route(ids, tables, cumulative, salt, slots, counts, space)

        self._launch(stream, _sizes_of(tables, ids.numel()), program)

    def route_levelled(
        self,
        ids: Tensor,
        tables: Tables,
        salt: Salt,
        group: GroupCounts | None,
        slots: Tensor,
        counts: Tensor,
        stream: Stream,
    ) -> None:
        """Route so that the batch is level over the ranks."""
        check_routing(ids, tables, salt.layer, slots, counts)
        check_group(group, tables)

        def program(space: "Workspace") -> None:
            record_stream_use(stream, ids, slots, counts)
            if group is not None:
                record_stream_use(stream, group.total, group.before)
            route = kernel_module("levelled_routing").route_levelled
            route(ids, tables, salt, group, slots, counts, space)

        self._launch(stream, _sizes_of(tables, ids.numel()), program)

    def route_by_rule(
        self,
        rule: ReplicaRule,
        ids: Tensor,
        tables: Tables,
        layer: int,
        slots: Tensor,
        counts: Tensor,
        stream: Stream,
    ) -> None:
        """Route as another engine would."""
        check_routing(ids, tables, layer, slots, counts)
        check_rule(rule, tables)

        def program(space: "Workspace") -> None:
            record_stream_use(stream, ids, slots, counts)
            if isinstance(rule, RowHash):
                record_stream_use(stream, rule.rows)
            kernel_module("engine_rules").route_by_rule(
                rule, ids, tables, layer, slots, counts, space
            )

        self._launch(stream, _sizes_of(tables), program)

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        """Water-filling on one layer's counts, on the device."""
        check_solve_shares(counts, tables, layer, cumulative)

        def program(space: "Workspace") -> None:
            record_stream_use(stream, counts, cumulative)
            kernel_module("share_solver").solve_shares(counts, tables, layer, cumulative, space)

        self._launch(stream, _sizes_of(tables), program)

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        """Fill the idle set of each changed layer, then advance its generation word.

        The update is taken at the call.
        """
        check_update(update, tables)
        with self._device.runtime.allowed_in_capture():
            block = pack_table_update(update)

        def program() -> None:
            rows = torch.empty(block.shape, dtype=block.dtype, device=tables.start.device)
            copy(rows, block)
            with _compiling(stream):
                kernel_module("table_commit").commit_tables(rows, tables)

        stream.launch(program)

    def checksum(self, data: Tensor, out: Tensor, stream: Stream) -> None:
        """Checksum of a contiguous tensor's bytes."""
        check_checksum(data, out)
        flat = data.detach().reshape(-1).view(torch.uint8)

        def program() -> None:
            record_stream_use(stream, data, out)
            self.checksum_parts([flat], out, stream)

        stream.launch(program)

    def checksum_parts(self, parts: Sequence[Tensor], out: Tensor, stream: Stream) -> None:
        """Checksum of parts back to back, uint8 [n] each, into `out`, int64 [1]; called by a
        program."""
        space = self._workspaces.get(own_stream(stream), _sizes(1, 1, 1))
        # A kernel can read host memory, but the host's allocator records the streams of copies
        # only, and would reuse a dropped block while the kernel still reads it.
        near = [part if part.device.type != HOST_TYPE else self._near(part) for part in parts]
        device_out = (
            out if out.device.type != HOST_TYPE else torch.empty_like(out, device=space.sums.device)
        )
        with _compiling(stream):
            kernel_module("checksums").checksum_parts(near, device_out, space)
        if device_out is not out:
            copy(out, device_out)

    def _near(self, data: Tensor) -> Tensor:
        device_copy = torch.empty(data.shape, dtype=data.dtype, device=self._device.torch)
        copy(device_copy, data)
        return device_copy

    def _launch(
        self, stream: Stream, sizes: "Sizes", program: Callable[["Workspace"], None]
    ) -> None:
        own = own_stream(stream)

        def whole() -> None:
            space = self._workspaces.get(own, sizes)
            with _compiling(own):
                program(space)

        own.launch(whole)


def make_kernels(device: Device) -> DeviceKernels:
    """Those of a device."""
    return CudaKernels(device)


def _compiling(stream: Stream) -> Any:
    """Allows what a capture forbids: a kernel that was never launched is loaded at its first
    launch."""
    own = own_stream(stream)
    return own.device.runtime.allowed_in_capture() if own.capturing else nullcontext()


def _sizes(experts: int, slots: int, ranks: int, elements: int = 1) -> "Sizes":
    sizes: Sizes = kernel_module("workspace").Sizes(experts, slots, ranks, elements, buffers=1)
    return sizes


def _sizes_of(tables: Tables, elements: int = 0) -> "Sizes":
    """Sizes for any batch up to a power of two, so that few workspaces are made."""
    room = max(MIN_ELEMENTS, 1 << (elements - 1).bit_length()) if elements else MIN_ELEMENTS
    return _sizes(tables.experts, tables.slots, tables.ranks, room)
