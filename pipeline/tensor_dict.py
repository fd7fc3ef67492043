"""Dictionaries of tensors between pipeline stages, called as serving engines call it.

`isend_tensor_dict` and `irecv_tensor_dict` have the signatures and the meaning of vLLM's group
coordinator (pull requests 33368 and 49274), so that a worker can be given this object instead.
Beneath are edges that describe a class of tensors once, in its first message, as JSON.
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
"""Receives that are posted ahead."""
BUFFERS_PER_END = 4
"""Buffers at each end of an edge."""


class CompletedHandle:
    """The handle of what is gone already.

    Engines keep a handle for the description of what they send before those of the tensors, and
    some wait for the others only. Nothing is described here, so the first one is this.
    """

    def is_completed(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class TensorDictGroup:
    """A pipeline's ranks, each of which hands dictionaries to the next, and the last to the first.

    Args:
        ranks: of the run, one a stage, in their order.
        rank: this one.
        senders: ends by stage, to which this rank sends.
        receivers: ends by stage, from which it receives.
        edges: of all of them; given back when the group is closed.
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
        """Whether this is the last one."""
        return self.rank_in_group == self.world_size - 1

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[str, Tensor | Constant],
        dst: int | None = None,
        all_gather_group: object | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> list[CommHandle]:
        """Begin to hand over a dictionary; the tensors may be written to by what is launched next.

        Args:
            tensor_dict: tensors on the group's device, and numbers and words; tensors that lie
                elsewhere are refused.
            dst: stage to send to; the next one by default.
            all_gather_group: anything but None: tensors are the same on all ranks of the slices,
                and each sends a slice of those that can be divided among them.
            all_gather_tensors: by name, whether that holds for the tensor; True by default.

        Returns:
            Two handles: of the description, which is gone, and of the message. Nobody need wait.

        Raises what `SendingEnd.send` raises, and `ChannelError` where there is no such edge.
        """
        stage = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        sliced: Collection[str] = ()
        if all_gather_group is not None:
            chosen = all_gather_tensors or {}
            tensors = [n for n, value in tensor_dict.items() if isinstance(value, Tensor)]
            sliced = [name for name in tensors if chosen.get(name, True)]
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
            all_gather_group, all_gather_tensors: what the sender says counts; kept for callers.

        Returns:
            A dictionary that is empty until the handles have been waited for and the callables
            called, in that order: as `AsyncIntermediateTensors` does at the first read.

        Raises what `DescribedReceivingEnd.receive` raises, and `ChannelError` where there is no
        such edge.
        """
        stage = (self.rank_in_group - 1) % self.world_size if src is None else src
        incoming = _end(self._receivers, stage, "from").receive()
        values: ReceivedValues = {}
        return values, [incoming], [lambda: values.update(incoming.take())]

    def drain(self) -> None:
        """Wait until everything has been sent. Raises what `SendingEnd.drain` raises."""
        for end in self._senders.values():
            end.drain()

    def close(self) -> None:
        """Refuse what comes from now on, and give the edges back; bounded by their deadline."""
        for sender in self._senders.values():
            sender.close()
        for receiver in self._receivers.values():
            receiver.close()
        for edge in self._edges:
            edge.close()


def open_tensor_dict_group(name: str, ranks: Sequence[int], place: EdgeContext) -> TensorDictGroup:
    """The edges from every stage to the next, and from the last to the first; collective.

    Args:
        name: no two groups of a run have one name.
        ranks: of the run, one a stage, in their order; at least two.
        place: of this rank's ends.

    Raises what `open_edge` raises.
    """
    if len(ranks) < 2:
        raise ChannelError(f"{name}: a pipeline of {len(ranks)} stages hands nothing over")
    rank = place.fabric.control.rank
    senders: dict[int, SendingEnd] = {}
    receivers: dict[int, DescribedReceivingEnd] = {}
    edges: list[Edge] = []
    for stage, source in enumerate(ranks):
        after = (stage + 1) % len(ranks)
        ends = (source, ranks[after])
        if rank not in ends:
            continue
        called = f"{name} {stage} to {after}"
        edge = open_edge(called, ends, place, BUFFERS_PER_END, {"described": RECVS_POSTED_AHEAD})
        edge = open_second_communicator(edge, ends, place)
        edges.append(edge)
        if rank == source:
            senders[after] = SendingEnd(edge, DescribedFraming(RECVS_POSTED_AHEAD))
        else:
            receivers[stage] = DescribedReceivingEnd(edge, RECVS_POSTED_AHEAD)
    return TensorDictGroup(ranks, rank, senders, receivers, edges)


def _end(ends: Mapping[int, T], stage: int, way: str) -> T:
    if stage not in ends:
        raise ChannelError(f"there is no edge {way} stage {stage}: {way} {sorted(ends)} there is")
    return ends[stage]
