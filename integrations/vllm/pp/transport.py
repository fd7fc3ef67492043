"""Sends what one pipeline stage of vLLM computes to the next as one message, over our channel.

vLLM's worker calls `irecv_tensor_dict` and `isend_tensor_dict` of its pipeline group. Both are
replaced on that one group object. Neither says how many rows a step has, but the scheduler has told
all stages: their workers' `execute_model` gets the same number of tokens. It is wrapped, so that
each receive is posted with its size, and nothing has to be described on the way.

An engine pads a step, to the size of a captured graph for example, and only its runner knows how
far. Padding does not travel: the receiver hands out tensors with rows for the largest step, of
which the runner takes as many as it pads to. What padding rows hold is never part of an answer.

The channels are opened in the profiling run of the model, so that the engine counts their buffers
before it divides the device's memory; or else in the first step.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.settings import PpTransportSettings
from equipoise.integrations.vllm.streams import EngineStreams
from equipoise.integrations.vllm.worker_context import (
    WorkerContext,
    open_worker_context,
    ranks_within,
)
from equipoise.pipeline.channel.edge import EdgeContext, SliceGroup
from equipoise.pipeline.channel.endpoints import (
    ChannelSpec,
    Receiver,
    Sender,
    open_receiver,
    open_sender,
)
from equipoise.pipeline.channel.schema import RowField, SchemaTemplate, SliceMode
from equipoise.pipeline.intermediate_tensors import CommHandle, Pollable

REPLACED_METHODS = "isend_tensor_dict", "irecv_tensor_dict"
PROBED_ROWS = 3
"""Rows of the tensors by which a model shows which of their dimensions are rows."""


class CompletedHandle:
    """A handle that is complete from the beginning."""

    def is_completed(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Returns at once."""


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


@dataclass(frozen=True)
class StageLinks:
    """The channel ends of one stage.

    Attributes:
        max_rows: rows of the largest step, padding included.
        from_previous: None on the first stage.
        to_next: None on the last stage.
        slices: ranks of the stage, each of which sends a slice.
    """

    max_rows: int
    from_previous: Receiver | None
    to_next: Sender | None
    slices: int

    def close(self) -> None:
        """Close both ends. Raises as `Sender.close` and `Receiver.close`."""
        for end in (self.from_previous, self.to_next):
            if end is not None:
                end.close()


class StageTransport:
    """The two methods that replace those of vLLM's pipeline group, and what wraps the worker's.

    Args:
        open_links: opens the stage's channels; collective of all stages.
        streams: the engine's streams.
    """

    def __init__(self, open_links: Callable[[], StageLinks], streams: EngineStreams) -> None:
        self._open_links = open_links
        self._streams = streams
        self._links: StageLinks | None = None
        self._rows: int | None = None

    def open(self) -> StageLinks:
        """Open the channels, if they are not open. Raises what `open_stage_links` raises."""
        if self._links is None:
            self._links = self._open_links()
        return self._links

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Within it, the worker executes a step of so many rows."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def close(self) -> None:
        """Close the channels."""
        if self._links is not None:
            self._links.close()

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[str, Tensor],
        dst: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> list[CommHandle]:
        """Begin to send the rows of this step; the tensors may be overwritten afterwards.

        vLLM waits for the handles before the next forward pass, which would block the host until
        the next stage has received. That wait is not needed, so the returned handles are complete.
        Some versions wait for all of them, others skip the first, which is a description's there;
        so there are two. If sending fails, the next message that needs the buffer raises.

        Args:
            tensor_dict: the tensors of the model's `make_empty_intermediate_tensors`, each with at
                least the rows of the step.
            dst: the next stage, which is the default.
            all_gather_group: the ranks of the stage, if each sends a slice.
            all_gather_tensors: which tensors that holds for; all of them.

        Raises:
            IntegrationError: it is called otherwise than by `execute_model` of a tested release.
            ShapeClassError: the tensors are not those that the next stage's model takes.
            Others: see `SendingEnd.send`.
        """
        links, rows = self._in_step()
        _check_call("sends", dst, all_gather_group, all_gather_tensors, links.slices)
        if links.to_next is None:
            raise IntegrationError("the last pipeline stage has nobody to send to")
        if short := [name for name, tensor in tensor_dict.items() if tensor.shape[0] < rows]:
            raise IntegrationError(
                f"{', '.join(short)}: fewer rows than the {rows} of the step, so they are not one "
                "per token, and pp_transport cannot send them"
            )
        with self._streams.ordered_section():
            links.to_next.send({name: tensor[:rows] for name, tensor in tensor_dict.items()})
        COUNTERS.add("sent_messages")
        return [CompletedHandle(), CompletedHandle()]

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> tuple[dict[str, Tensor], list[CommHandle], list[Callable[[], None]]]:
        """Post the receive of this step.

        Returns:
            The tensors, each with rows for the largest step, of which the first are those of this
            step; the handle to wait for before reading them; no post-processing.

        Raises:
            IntegrationError: it is called otherwise than by `execute_model` of a tested release.
            Others: see `ReceivingEnd.expect` and `Receiver.take`.
        """
        links, rows = self._in_step()
        _check_call("receives", src, all_gather_group, all_gather_tensors, links.slices)
        if links.from_previous is None:
            raise IntegrationError("the first pipeline stage has nobody to receive from")
        with self._streams.ordered_section():
            links.from_previous.expect(rows)
            tensors, handle = links.from_previous.take(links.max_rows)
        COUNTERS.add("received_messages")
        return tensors, [StreamOrderedHandle(handle, self._streams)], []

    def _in_step(self) -> tuple[StageLinks, int]:
        if self._links is None or self._rows is None:
            raise IntegrationError(
                "tensors are handed over outside of the worker's execute_model: pp_transport does "
                "not know how many rows they have"
            )
        return self._links, self._rows


def _check_call(
    verb: str,
    stage: int | None,
    all_gather_group: Any,
    all_gather_tensors: Mapping[str, bool] | None,
    slices: int,
) -> None:
    """Raise `IntegrationError` for what the tested releases do not ask for."""
    gathered = 1 if all_gather_group is None else all_gather_group.world_size
    if stage is not None or all_gather_tensors or gathered != slices:
        raise IntegrationError(
            f"the worker {verb} with a stage of its choice ({stage}), slices among {gathered} of "
            f"{slices} ranks, or whole tensors beside slices ({all_gather_tensors}): pp_transport "
            "does not support that; sequence parallelism asks for it"
        )


def step_template(worker: Any, slices: int) -> SchemaTemplate:
    """Return the tensors that a stage takes.

    Args:
        worker: of the engine; its model is loaded.
        slices: ranks of the stage.

    Raises:
        IntegrationError: the tensors do not have one row per token, or not one dtype.
    """
    tensors = worker.get_model().make_empty_intermediate_tensors(
        batch_size=PROBED_ROWS, dtype=worker.model_config.dtype, device=torch.device("cpu")
    )
    fields = []
    for name, tensor in tensors.items():
        if not tensor.dim() or tensor.shape[0] != PROBED_ROWS:
            raise IntegrationError(
                f"the model's stages hand over {name} with shape {list(tensor.shape)} for "
                f"{PROBED_ROWS} tokens: pp_transport sends one row per token"
            )
        row_shape = tuple(tensor.shape[1:])
        even = prod(row_shape) % slices == 0
        mode = SliceMode.SLICED if slices > 1 and even else SliceMode.WHOLE
        fields.append(RowField(name, row_shape, tensor.dtype, mode))
    # `Receiver.take` promises finite padding rows for one dtype only.
    if len(dtypes := {str(field.dtype) for field in fields}) != 1:
        raise IntegrationError(
            f"the model's stages hand over tensors of {' and '.join(sorted(dtypes)) or 'no'} "
            "dtype: pp_transport sends tensors of one dtype"
        )
    return SchemaTemplate(tuple(fields), worker.model_runner.max_num_tokens)


def open_stage_links(worker: Any, stages: Sequence[int], context: EdgeContext) -> StageLinks:
    """Open the channels of this rank's stage; collective of all stages.

    Args:
        worker: of the engine; its model is loaded.
        stages: ranks on the fabric, one per stage, in order.
        context: of this rank's ends.

    Raises `IntegrationError` as `step_template`, and what `open_sender` raises.
    """
    slices = context.slice_group.size if context.slice_group is not None else 1
    rank, receiver, sender = context.fabric.control.rank, None, None
    max_rows = worker.model_runner.max_num_tokens
    for stage, (source, destination) in enumerate(pairwise(stages)):
        if rank not in (source, destination):
            continue
        name = f"vllm stages from {stages[0]} on, {stage} to {stage + 1}"
        template = _agreed_template(
            f"{name}: template",
            destination,
            context,
            lambda: step_template(worker, slices),
        )
        # As many buffers as the engine has steps in flight: when a step comes that needs the first
        # one again, the scheduler has had the answer of the step that used it.
        spec = ChannelSpec(
            name=name,
            source=source,
            destination=destination,
            template=template,
            depth=worker.vllm_config.max_concurrent_batches,
        )
        if rank == source:
            sender = open_sender(spec, context)
        else:
            receiver = open_receiver(spec, context)
    return StageLinks(max_rows, receiver, sender, slices)


def _agreed_template(
    question: str,
    destination: int,
    context: EdgeContext,
    own_template: Callable[[], SchemaTemplate],
) -> SchemaTemplate:
    """Return what the destination's model takes, on both ends of an edge.

    What a model hands over may depend on the stage, so the source's own would be another.

    Raises `IntegrationError` on both ends if the destination's cannot be sent.
    """
    control = context.fabric.control
    if control.rank == destination:
        try:
            answer = {"template": own_template().to_json()}
        except IntegrationError as error:
            answer = {"refused": str(error)}
        control.cast(question, json.dumps(answer).encode())
    (ballot,) = control.collect(question, context.deadline, (destination,))
    answer = json.loads(ballot)
    if "refused" in answer:
        raise IntegrationError(answer["refused"])
    return SchemaTemplate.from_json(answer["template"])


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
def install_transport(settings: PpTransportSettings, worker: Any) -> Iterator[None]:
    """Replace methods of this process's pipeline group, and wrap two of the worker's objects,
    while the context lasts. The worker has a device and a runner."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group

    group, world = get_pp_group(), get_world_group()
    context = open_worker_context(world, worker.device, settings.timeout)
    try:
        edge_context = EdgeContext(
            fabric=context.fabric,
            accelerator=context.accelerator,
            stream=context.streams.compute_stream,
            deadline=settings.timeout,
            slice_group=_open_slice_group(context, ranks_within(world, get_tp_group())),
        )
    except BaseException:
        context.close()
        raise
    stages = ranks_within(world, group)
    transport = StageTransport(
        lambda: open_stage_links(worker, stages, edge_context), context.streams
    )
    for name in REPLACED_METHODS:
        setattr(group, name, getattr(transport, name))
    try:
        with _wrap_worker(worker, transport):
            yield
    finally:
        for name in REPLACED_METHODS:
            delattr(group, name)
        transport.close()
        context.close()


@contextmanager
def _wrap_worker(worker: Any, transport: StageTransport) -> Iterator[None]:
    """Open the channels in the profiling run or the first step; note the rows of every step.

    On the objects, not on their classes, which other code may have derived from.
    """
    runner = worker.model_runner
    profile_run, execute_model = runner.profile_run, worker.execute_model

    def profile_run_with_buffers(*arguments: Any, **keywords: Any) -> None:
        transport.open()
        profile_run(*arguments, **keywords)

    def execute_model_of_known_size(scheduler_output: Any) -> Any:
        transport.open()
        with transport.step(scheduler_output.total_num_scheduled_tokens):
            return execute_model(scheduler_output)

    runner.profile_run = profile_run_with_buffers
    worker.execute_model = execute_model_of_known_size
    try:
        yield
    finally:
        del runner.profile_run, worker.execute_model
