"""Tensor dictionaries between pipeline stages, with the interface of vLLM's group coordinator.

`isend_tensor_dict` and `irecv_tensor_dict` have the signatures and the semantics of vLLM's
`GroupCoordinator` (pull requests 33368 and 49274), so that a worker can use this object instead.
They use edges that describe each schema once, as JSON in its first message.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from equipoise.hal.errors import ChannelError
from equipoise.pipeline.channel.described_recv import DescribedReceivingEnd, ReceivedValues
from equipoise.pipeline.channel.edge import Edge, EdgeContext, open_edge, open_second_communicator
from equipoise.pipeline.channel.framing import DescribedFraming
from equipoise.pipeline.channel.schema import Constant, schema_of
from equipoise.pipeline.channel.send import SendingEnd
from equipoise.pipeline.intermediate_tensors import CommHandle

T = TypeVar("T")
RECVS_POSTED_AHEAD = 2
"""Receives that each end posts ahead. Part of what both ends must agree on."""
BUFFERS_PER_END = 4
"""Buffers at each end of an edge: those posted ahead, and as many that may still be read."""


class CompletedHandle:
    """A handle that is complete from the beginning.

    Engines keep a handle of the description before those of the tensors, and some wait for the
    latter only. Here the description is not sent separately, so its handle is this one.
    """

    def is_completed(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class TensorDictGroup:
    """The ranks of a pipeline; each sends dictionaries to the next, and the last to the first.

    Args:
        ranks: ranks of the run, one per stage, in order.
        rank: this rank.
        senders: sending ends, by the stage that they send to.
        receivers: receiving ends, by the stage that they receive from.
        edges: the edges of all ends; closed with the group.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        senders: Mapping[int, SendingEnd],
        receivers: Mapping[int, DescribedReceivingEnd],
        edges: Sequence[Edge],
    ) -> None:
        self._edges = edges
        self.ranks = list(ranks)
        self.world_size = len(ranks)
        self.rank_in_group = self.ranks.index(rank)
        self._senders = senders
        self._receivers = receivers

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the first stage."""
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        """Whether this is the last stage."""
        return self.rank_in_group == self.world_size - 1

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[str, Tensor | Constant],
        dst: int | None = None,
        all_gather_group: object | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> list[CommHandle]:
        """Begin to send a dictionary; whatever is launched next may overwrite the tensors.

        Args:
            tensor_dict: tensors on the group's device, numbers and strings. Tensors on other
                devices are refused.
            dst: stage to send to; the next one by default.
            all_gather_group: if not None, the tensors are equal on all ranks of the slice group,
                and each rank sends a slice of those that can be divided evenly.
            all_gather_tensors: by name, whether that holds for the tensor; True by default.

        Returns:
            Two handles: of the description, already complete, and of the message. Waiting for them
            is optional.

        Raises what `SendingEnd.send` raises, and `ChannelError` if there is no such edge.
        """
        stage = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        sliced: Collection[str] = ()
        if all_gather_group is not None:
            gathered = all_gather_tensors or {}
            tensors = [n for n, value in tensor_dict.items() if isinstance(value, Tensor)]
            sliced = [name for name in tensors if gathered.get(name, True)]
        end = _end(self._senders, stage, "to")
        return [CompletedHandle(), end.send(tensor_dict, schema_of(tensor_dict, sliced))]

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: object | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> tuple[ReceivedValues, list[CommHandle], list[Callable[[], None]]]:
        """Begin to receive a dictionary; returns at once.

        Args:
            src: stage to receive from; the one before by default.
            all_gather_group, all_gather_tensors: ignored, since the sender decides; kept for
                callers.

        Returns:
            A dictionary, handles and callables. The dictionary is empty until the handles have been
            waited for and then the callables called, which `AsyncIntermediateTensors` does at the
            first read.

        Raises what `DescribedReceivingEnd.receive` raises, and `ChannelError` if there is no such
        edge.
        """
        stage = (self.rank_in_group - 1) % self.world_size if src is None else src
        handle = _end(self._receivers, stage, "from").receive()
        values: ReceivedValues = {}
        return values, [handle], [lambda: values.update(handle.take())]

    def drain(self) -> None:
        """Wait until all messages have been sent. Raises what `SendingEnd.drain` raises."""
        for end in self._senders.values():
            end.drain()

    def close(self) -> None:
        """Refuse further messages and close the edges; bounded by their deadline."""
        for sender in self._senders.values():
            sender.close()
        for receiver in self._receivers.values():
            receiver.close()
        for edge in self._edges:
            edge.close()


def open_tensor_dict_group(
    name: str, ranks: Sequence[int], context: EdgeContext
) -> TensorDictGroup:
    """Open the edges from every stage to the next, and from the last to the first; collective.

    Args:
        name: unique among the groups of a run.
        ranks: ranks of the run, one per stage, in order; at least two.
        context: of this rank's ends.

    Raises what `open_edge` raises.
    """
    if len(ranks) < 2:
        raise ChannelError(f"{name}: a pipeline of {len(ranks)} stages has no edges")
    rank = context.fabric.control.rank
    senders: dict[int, SendingEnd] = {}
    receivers: dict[int, DescribedReceivingEnd] = {}
    edges: list[Edge] = []
    for stage, source in enumerate(ranks):
        next_stage = (stage + 1) % len(ranks)
        ends = (source, ranks[next_stage])
        if rank not in ends:
            continue
        edge_name = f"{name} {stage} to {next_stage}"
        edge = open_edge(
            edge_name, ends, context, BUFFERS_PER_END, {"described": RECVS_POSTED_AHEAD}
        )
        edge = open_second_communicator(edge, ends, context)
        edges.append(edge)
        if rank == source:
            senders[next_stage] = SendingEnd(edge, DescribedFraming(RECVS_POSTED_AHEAD))
        else:
            receivers[stage] = DescribedReceivingEnd(edge, RECVS_POSTED_AHEAD)
    return TensorDictGroup(ranks, rank, senders, receivers, edges)


def _end(ends: Mapping[int, T], stage: int, direction: str) -> T:
    if stage not in ends:
        raise ChannelError(
            f"there is no edge {direction} stage {stage}: {direction} {sorted(ends)} there is"
        )
    return ends[stage]
