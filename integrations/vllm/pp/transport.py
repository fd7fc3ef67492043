"""Sends tensor dictionaries between vLLM's pipeline stages as one message each, over our channel.

vLLM's worker calls `isend_tensor_dict` and `irecv_tensor_dict` of its pipeline group. Both are
replaced on that one group object by those of a `TensorDictGroup`, which have the same signatures.
Some versions wait for all handles of a send, others skip the first, which is the description's
there; so ours returns a handle in that position, too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.settings import PpTransportSettings
from equipoise.integrations.vllm.streams import EngineStreams
from equipoise.integrations.vllm.worker_context import (
    WorkerContext,
    open_worker_context,
    ranks_within,
)
from equipoise.pipeline.channel.edge import EdgeContext, SliceGroup
from equipoise.pipeline.channel.schema import Constant
from equipoise.pipeline.intermediate_tensors import CommHandle, Pollable
from equipoise.pipeline.tensor_dict import CompletedHandle, TensorDictGroup, open_tensor_dict_group

REPLACED_METHODS = "isend_tensor_dict", "irecv_tensor_dict"


class StreamOrderedHandle:
    """Handle of a message; `wait` makes the engine's stream wait for it.

    Args:
        inner: makes the edge's stream wait for the message.
        streams: the engine's streams.
    """

    def __init__(self, inner: CommHandle, streams: EngineStreams) -> None:
        self._inner = inner
        self._streams = streams

    def is_completed(self) -> bool:
        """Whether `wait` would return at once; False if unknown."""
        return isinstance(self._inner, Pollable) and self._inner.is_completed()

    def wait(self) -> None:
        """Raises what the message's own handle raises."""
        with self._streams.ordered_section():
            self._inner.wait()


class TensorDictTransport:
    """The two methods that replace those of vLLM's pipeline group.

    Args:
        group: sends and receives the dictionaries.
        streams: the engine's streams.
    """

    def __init__(self, group: TensorDictGroup, streams: EngineStreams) -> None:
        self._group = group
        self._streams = streams

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[str, Tensor | Constant],
        dst: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> list[CommHandle]:
        """See `TensorDictGroup.isend_tensor_dict`; the tensors may be overwritten afterwards.

        vLLM waits for the handles before the next forward pass, which would block the host until
        the next stage has received. That wait is not needed, so the returned handles are complete.
        If sending fails, the next message that needs the buffer raises.
        """
        whole = None if all_gather_group is None or all_gather_group.world_size == 1 else self
        with self._streams.ordered_section():
            handles = self._group.isend_tensor_dict(tensor_dict, dst, whole, all_gather_tensors)
        COUNTERS.add("sent_messages")
        return [CompletedHandle() for _ in handles]

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> tuple[Any, list[CommHandle], list[Callable[[], None]]]:
        """See `TensorDictGroup.irecv_tensor_dict`."""
        COUNTERS.add("received_messages")
        with self._streams.ordered_section():
            values, handles, postprocess = self._group.irecv_tensor_dict(src)
        return (
            values,
            [StreamOrderedHandle(handle, self._streams) for handle in handles],
            postprocess,
        )


def _open_slice_group(context: WorkerContext, ranks: list[int]) -> SliceGroup | None:
    """Open the slice group of this rank's tensor-parallel group; None if it has one rank."""
    if len(ranks) == 1:
        return None
    gather_communicator, verify_communicator = (
        context.fabric.open(f"vllm slices {purpose} {min(ranks)}", ranks)
        for purpose in ("gathering", "comparing")
    )
    return SliceGroup(gather_communicator, verify_communicator)


@contextmanager
def install_transport(settings: PpTransportSettings, device: torch.device) -> Iterator[None]:
    """Replace the methods of this process's pipeline group while the context lasts."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group

    stages, world = get_pp_group(), get_world_group()
    context = open_worker_context(world, device, settings.timeout)
    try:
        edge_context = EdgeContext(
            fabric=context.fabric,
            accelerator=context.accelerator,
            stream=context.streams.compute_stream,
            deadline=settings.timeout,
            slice_group=_open_slice_group(context, ranks_within(world, get_tp_group())),
        )
        ranks = ranks_within(world, stages)
        group = open_tensor_dict_group(f"vllm stages from {ranks[0]} on", ranks, edge_context)
    except BaseException:
        context.close()
        raise
    transport = TensorDictTransport(group, context.streams)
    for name in REPLACED_METHODS:
        setattr(stages, name, getattr(transport, name))
    try:
        yield
    finally:
        for name in REPLACED_METHODS:
            delattr(stages, name)
        group.close()
        context.close()
