"""The communicators of the library that one communicator of the contract uses between two
rebuilds."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from equipoise.backends.common.bounded_wait import Deadline
from equipoise.backends.devices.collectives.ccl import Ccl, CommSpec, Warmup
from equipoise.backends.devices.collectives.comm_init import (
    CommBuilder,
    CommPlan,
    warm_up_group,
    warm_up_link,
)
from equipoise.backends.devices.collectives.comm_stream import CommStream, Launch
from equipoise.backends.devices.collectives.p2p_link import LinkSpec, P2PLink
from equipoise.backends.devices.collectives.teardown import TeardownQueue
from equipoise.backends.devices.collectives.watchdog import Watchdog
from equipoise.backends.devices.collectives.work import DeviceWork, StreamReleaser
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import CommunicatorFailed


@dataclass(frozen=True)
class CommContext:
    """What a communicator needs for all its life.

    Attributes:
        purpose: what it is for, for errors.
        rank: this rank's number in the run.
        deadline: seconds that an operation may take.
        ccl: the library.
        device: where it runs.
        builder: makes communicators of the library.
        watchdog: ends operations at their deadline.
        teardowns: release communicators of the library.
    """

    purpose: str
    rank: int
    deadline: float
    ccl: Ccl
    device: Device
    builder: CommBuilder
    watchdog: Watchdog
    teardowns: TeardownQueue


class CommSet:
    """A communicator of the library for the whole group, and a link per pair and direction in use.

    Not thread-safe: callers hold the lock of the communicator.

    Args:
        context: of the communicator.
        ranks: members, numbers of the run.
        name: unique in the run; another one after each rebuild.
        expiry: when to give up making it, by the monotonic clock.

    Raises:
        CommunicatorFailed: a member is late.
    """

    def __init__(
        self, context: CommContext, ranks: Sequence[int], name: str, expiry: float
    ) -> None:
        self.ranks = tuple(ranks)
        self.failure: CommunicatorFailed | None = None
        self._context = context
        self._name = name
        self._links: dict[tuple[int, int], P2PLink] = {}
        self._works: list[DeviceWork] = []
        self._retired = False
        spec = self._comm_spec(name, self.ranks, link=False)
        self._comm_stream = self._build_comm(spec, warm_up_group, context.builder.deadline(expiry))
        library, index = context.ccl, context.device.index
        self._releaser = StreamReleaser(
            context.device, library.release_stream(index), lambda: library.deferred_event(index)
        )

    @property
    def rank(self) -> int:
        """This rank's place among the members."""
        return self.ranks.index(self._context.rank)

    def collective(self, what: str, launch: Launch, buffers: Sequence[Tensor]) -> DeviceWork:
        """An operation of the whole group. Raises `CommunicatorFailed`."""
        work = self._work(what)
        try:
            inflight = self._comm_stream.launch(launch, buffers)
        except RuntimeError as error:
            work.fail(f"was not launched: {error}")
            work.result(0.0)  # raises that
        except BaseException as error:  # by a signal's handler, in the middle of it
            work.fail(f"was interrupted by {error!r}")
            raise
        else:
            work.set_inflight(inflight, self._comm_stream.stream)
            self._context.watchdog.watch(work)
        return work

    def completed_work(self, what: str) -> DeviceWork:
        """The handle of an operation that has nothing to do."""
        work = self._work(what)
        work.complete()
        return work

    def message(self, what: str, pair: tuple[int, int], tensor: Tensor) -> DeviceWork:
        """One end of a message between two members, given by their places."""
        work = self._work(what)
        try:
            self._link(pair).issue(work, tensor)
        except BaseException as error:  # by a signal's handler, in the middle of it
            work.fail(f"was interrupted by {error!r}")
            raise
        self._context.watchdog.watch(work)
        return work

    def connect(self, pair: tuple[int, int], expiry: float) -> None:
        """Make a link now, if this rank is one of its ends."""
        if self.rank in pair and pair[0] != pair[1]:
            self._link(pair).connect(expiry)

    def abort(self) -> None:
        """End everything in flight with an error, and release all communicators of the library."""
        self._fail(CommunicatorFailed("it was aborted"))
        for work in self._works:
            work.fail("was aborted")
        self.retire()

    def retire(self) -> None:
        """Release all communicators of the library as soon as they are idle on all members. Nothing
        is issued any more."""
        if self._retired:
            return
        self._retired = True
        self._tear_down(self._comm_stream)
        for link in self._links.values():
            link.retire(self._tear_down)
        self._context.watchdog.start_teardown()

    def barrier(self) -> Launch:
        """An all-reduce of a byte: torch's own barriers make the host wait for the device."""
        scratch = self._comm_stream.scratch
        return lambda group: group.all_reduce(scratch)

    @property
    def scratch(self) -> Tensor:
        """int8 [1], whose contents do not matter."""
        return self._comm_stream.scratch

    def _work(self, operation: str) -> DeviceWork:
        self._comm_stream.collect_completed()
        for link in self._links.values():
            link.collect_completed()
        label = f"{operation} of {self._context.purpose!r}"
        work = DeviceWork(label, self._context.deadline, self._fail, self._releaser)
        self._works = [pending for pending in self._works if not pending.has_ended]
        self._works.append(work)
        return work

    def _fail(self, failure: CommunicatorFailed) -> None:
        self.failure = self.failure or failure

    def _tear_down(self, comm_stream: CommStream) -> None:
        """Release a communicator of the library. After a failure what hangs there would hang until
        the other members join, so it is aborted instead of waited for."""
        if self.failure is not None and not comm_stream.collect_completed():
            comm_stream.abort(self.failure)
        self._context.teardowns.add(comm_stream)

    def _link(self, pair: tuple[int, int]) -> P2PLink:
        if pair not in self._links:
            self._links[pair] = self._new_link(pair)
        return self._links[pair]

    def _new_link(self, pair: tuple[int, int]) -> P2PLink:
        name = f"{self._name}/{pair[0]}-{pair[1]}"
        ends = tuple(self.ranks[index] for index in pair)
        spec = self._comm_spec(name, ends, link=True)
        operation = "isend" if pair[0] == self.rank else "irecv"

        def make(deadline: Deadline) -> CommStream:
            return self._build_comm(spec, warm_up_link, deadline)

        link = LinkSpec(self._context.ccl.name, name, operation, self._context.device)
        return P2PLink(link, make, self._context.builder.deadline)

    def _comm_spec(self, name: str, ranks: tuple[int, ...], link: bool) -> CommSpec:
        rank = ranks.index(self._context.rank)
        return CommSpec(name, ranks, rank, link, self._context.deadline)

    def _build_comm(self, spec: CommSpec, warmup: Warmup, deadline: Deadline) -> CommStream:
        plan = CommPlan(spec, warmup, self._context.device)
        return self._context.builder.build(plan, deadline)
