"""A communicator between two rebuilds: its channels, and whether it is still sound."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from equipoise.backends.ascend import native
from equipoise.backends.ascend.building import Builder, Greet, Plan
from equipoise.backends.ascend.channel import Channel, Launch
from equipoise.backends.ascend.greeting import greet_all, greet_peer
from equipoise.backends.ascend.group import Membership
from equipoise.backends.ascend.lanes import lanes
from equipoise.backends.ascend.links import Link
from equipoise.backends.ascend.parting import Partings
from equipoise.backends.ascend.settings import group_buffer, link_buffer
from equipoise.backends.ascend.watchdog import Watchdog
from equipoise.backends.ascend.work import Bell, HcclWork
from equipoise.backends.devices.patience import Patience
from equipoise.hal.errors import CommunicatorFailed


@dataclass(frozen=True)
class Setting:
    """What a communicator works with, all its life.

    Attributes:
        purpose: what it is for, for errors.
        rank: this rank's number in the run.
        deadline: seconds that an operation may take.
        index: of the device.
        builder: makes channels.
        watchdog: ends operations at their deadline.
        partings: give channels back.
    """

    purpose: str
    rank: int
    deadline: float
    index: int
    builder: Builder
    watchdog: Watchdog
    partings: Partings


class Incarnation:
    """The channel of the whole group, and a link for each direction and pair that is in use.

    Not for several threads: whoever issues holds the communicator's lock.

    Args:
        setting: of the communicator.
        ranks: members, numbers of the run.
        name: of this incarnation; no other of the run has it.
        expiry: when to give up making it, by the monotonic clock.

    Raises:
        CommunicatorFailed: a member does not come in time.
    """

    def __init__(self, setting: Setting, ranks: Sequence[int], name: str, expiry: float) -> None:
        self.ranks = tuple(ranks)
        self.failure: CommunicatorFailed | None = None
        self._setting = setting
        self._name = name
        self._links: dict[tuple[int, int], Link] = {}
        members = self._membership(name, self.ranks, group_buffer())
        self._channel = self._made(members, greet_all, setting.builder.patience(expiry))
        npu = native.npu()
        self._bell = Bell(setting.index, lanes(npu, setting.index).bell)

    @property
    def rank(self) -> int:
        """This rank's place among the members."""
        return self.ranks.index(self._setting.rank)

    def whole(self, what: str, launch: Launch, buffers: Sequence[Tensor]) -> HcclWork:
        """An operation of the whole group. Raises `CommunicatorFailed`."""
        work = self._work(what)
        try:
            flight = self._channel.fly(launch, buffers)
        except RuntimeError as error:
            work.fail(f"was not launched: {error}")
            work.result(0.0)  # raises that
        else:
            work.launched(flight, self._channel.lane)
            self._setting.watchdog.watch(work)
        return work

    def nothing(self, what: str) -> HcclWork:
        """An operation that has nothing to do."""
        work = self._work(what)
        work.land()
        return work

    def message(self, what: str, pair: tuple[int, int], tensor: Tensor) -> HcclWork:
        """One end of a message between two members, given by their places."""
        work = self._work(what)
        self._link(pair).issue(work, tensor)
        self._setting.watchdog.watch(work)
        return work

    def warm(self, pair: tuple[int, int], expiry: float) -> None:
        """Make a link now, if this rank is an end of it."""
        if self.rank in pair and pair[0] != pair[1]:
            self._link(pair).warm(expiry)

    def retire(self) -> None:
        """Give every channel back, as soon as that can be; nothing is issued any more."""
        part = self._setting.partings.add
        part(self._channel)
        for link in self._links.values():
            link.retire(part)
        self._setting.watchdog.part()

    def barrier(self) -> Launch:
        """A sum of nothing; torch_npu's own barrier would make the host wait for the device."""
        scratch = self._channel.scratch
        return lambda group: group.allreduce([scratch])

    @property
    def scratch(self) -> Tensor:
        """int8 [1], whose contents nobody wants."""
        return self._channel.scratch

    def _work(self, what: str) -> HcclWork:
        self._channel.reap()
        for link in self._links.values():
            link.reap()
        label = f"{what} of {self._setting.purpose!r}"
        return HcclWork(label, self._setting.deadline, self._fail, self._bell)

    def _fail(self, failure: CommunicatorFailed) -> None:
        self.failure = self.failure or failure

    def _link(self, pair: tuple[int, int]) -> Link:
        if pair not in self._links:
            self._links[pair] = self._new_link(pair)
        return self._links[pair]

    def _new_link(self, pair: tuple[int, int]) -> Link:
        name = f"{self._name}/{pair[0]}-{pair[1]}"
        ends = tuple(self.ranks[place] for place in pair)
        members = self._membership(name, ends, link_buffer())
        way = "isend" if pair[0] == self.rank else "irecv"
        make: Callable[[Patience], Channel] = lambda p: self._made(members, greet_peer, p)  # noqa: E731
        index = self._setting.index
        settle: Callable[[], None] = lambda: native.settle_thread(index)  # noqa: E731
        return Link(name, way, make, self._setting.builder.patience, settle)

    def _membership(self, name: str, ranks: tuple[int, ...], buffer: int) -> Membership:
        return Membership(name, ranks, ranks.index(self._setting.rank), buffer)

    def _made(self, members: Membership, greet: Greet, patience: Patience) -> Channel:
        plan = Plan(members, greet, self._setting.index)
        return self._setting.builder.build(plan, patience)
