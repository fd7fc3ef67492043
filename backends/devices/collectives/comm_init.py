"""The first operations of a group: libraries build their links with them, and block meanwhile.

Each kind of collective has links of its own, and so has every pair of ranks in a batch. So all of
them are used once, by all ranks at once, before anybody else uses the group.

Makes channels: bounded, each on a stream of its own; one at a time on a rank where need be.

**Attempts.** Where a channel was not made in time, its members may try again under the same name.
Each takes back what it has said then: a rank that comes late must not take the "here" of an
attempt that was given up for that of a rank which waits. The first member numbers the attempts and
says the number with "turn"; all later words, and what the library gets to hear, carry it. A
member never joins an attempt twice: where the library's members meet may be told once only.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.backends.common.bounded_wait import Deadline
from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.backends.devices.collectives.bootstrap import Bootstrap, InitLock
from equipoise.backends.devices.collectives.ccl import Ccl, CclComm, CommSpec, Warmup, WarmupOps
from equipoise.backends.devices.collectives.comm_stream import CommStream
from equipoise.backends.devices.collectives.teardown import UNRELEASED_COMMS
from equipoise.backends.devices.collectives.work import OpStatus
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed, ControlError
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD


def warm_up_group(group: CclComm, rank: int, size: int, device: Any) -> WarmupOps:
    """Use every kind of operation of a communicator; the sum comes last, for it joins all."""
    word, words = _zeros(1, torch.int32, device), _zeros(size, torch.int32, device)
    into, given = _zeros(size, torch.int8, device), _zeros(size, torch.int8, device)
    byte = _zeros(1, torch.int8, device)
    group.all_gather(into, byte)
    group.reduce_scatter(word, words)
    group.broadcast(byte, 0)
    group.all_to_all(into, given, (), ())
    group.all_to_all(into, given, [1] * size, [1] * size)
    peers = [peer for peer in range(size) if peer != rank]
    if peers:
        operations = ["irecv"] * len(peers) + ["isend"] * len(peers)
        blobs = [part[peer : peer + 1] for part in (into, given) for peer in peers]
        group.batch(operations, blobs, peers + peers)
    last = group.all_reduce(word)
    return WarmupOps(last, (word, words, into, given, byte), byte)


def warm_up_link(group: CclComm, rank: int, size: int, device: Any) -> WarmupOps:
    """Send a byte from rank 0 to rank 1."""
    byte = _zeros(1, torch.int8, device)
    sent = group.message("isend" if rank == 0 else "irecv", byte, 1 - rank)
    return WarmupOps(sent, (byte,), byte)


def _zeros(count: int, dtype: torch.dtype, device: Any) -> Tensor:
    return torch.zeros(count, dtype=dtype).to(device)


POLL_INTERVAL = 0.0005
"""Seconds between two looks at whether the greeting has ended."""
EARLIER_POLL_INTERVAL = 0.005
"""Seconds between two looks at whether an earlier channel has been made."""


@dataclass(frozen=True)
class CommPlan:
    """What is to be made.

    Attributes:
        spec: of the group.
        warmup: its first operations.
        device: where it runs.
    """

    spec: CommSpec
    warmup: Warmup
    device: Device


class PendingComms:
    """Channels of this process that are being made, also those that nobody waits for any more.

    Nobody can end a library's call, so one that was given up goes on, and the next has to wait for
    it. Torch_npu takes the next stream of its pool for whatever is made: of two at once one would
    run on a stream that is not its own, behind whatever hangs there. And each first operation
    blocks torch_npu's launch queue until all members have issued it, so that they must come in one
    order on all ranks.

    For any number of threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Future[CommStream], tuple[CommBuilder, CommSpec]] = {}

    def add(self, made: Future[CommStream], builder: "CommBuilder", spec: CommSpec) -> None:
        """It is being made from now on."""
        with self._lock:
            self._under_way[made] = builder, spec

    def remove(self, made: Future[CommStream]) -> None:
        """The library has returned, with or without a channel."""
        with self._lock:
            self._under_way.pop(made, None)

    def forget_lost(self, builder: "CommBuilder", lost: int) -> None:
        """Forget what `builder` makes with a lost rank: it will never issue all of its operations,
        and the survivors must be able to make others."""
        with self._lock:
            for made, (owner, spec) in list(self._under_way.items()):
                if owner is builder and lost in spec.ranks:
                    del self._under_way[made]

    def names(self) -> tuple[str, ...]:
        """What is being made."""
        with self._lock:
            return tuple(spec.name for _, spec in self._under_way.values())


PENDING_COMMS = PendingComms()
"""Of this process, for all fabrics: the launch queue is the process's."""


class CommBuilder:
    """Makes channels for one fabric.

    Args:
        library: whose.
        control: carries what the ranks tell each other.
    """

    def __init__(self, library: Ccl, control: StoreControlPlane) -> None:
        self._library = library
        self._control = control
        self._given_up = threading.Event()
        self._attempts: dict[str, int] = {}
        """By name of what could not be made yet: the last attempt that this rank took part in."""

    def deadline(self, expiry: float) -> Deadline:
        """Until that moment, or until the fabric closes."""
        return Deadline(expiry, self._given_up)

    def give_up(self) -> None:
        """What is being made will not be used."""
        self._given_up.set()
        self._drop_lost()  # later nobody can ask this control plane who was lost

    def build(self, plan: CommPlan, deadline: Deadline) -> CommStream:
        """Make a channel together with all its members, every one of which calls this.

        After a failure all of them may call it again. Raises `CommunicatorFailed` when a member
        does not come in time; names it. Also when a channel that was given up is still being made.
        """
        UNRELEASED_COMMS.release_idle()
        name = plan.spec.name
        bootstrap = Bootstrap(
            self._control, f"{self._library.name}/{name}", plan.spec.ranks, deadline
        )
        try:
            comm_stream = self._agree_on_attempt(plan, bootstrap, deadline)
        except BallotIncomplete as error:
            raise CommunicatorFailed(
                f"{name}: the ranks did not all meet in time: no word from rank(s) {error.missing}"
            ) from error
        except ControlError as error:
            raise CommunicatorFailed(f"{name}: {error}") from error
        finally:
            # After a success every member has heard everything, for its greeting has ended.
            with suppress(ControlError):
                bootstrap.withdraw()
        self._attempts.pop(name, None)
        return comm_stream

    def _agree_on_attempt(
        self, plan: CommPlan, bootstrap: Bootstrap, deadline: Deadline
    ) -> CommStream:
        """Agree on the attempt, and that all members are about to make it."""
        spec = plan.spec
        bootstrap.barrier("here", spec.ranks)
        if spec.rank > 0:
            number = self._receive_attempt(spec, bootstrap, deadline)
            self._await_earlier(spec.name, deadline)
            return self._try(plan, number, deadline)
        with self._init_lock(spec, deadline):
            self._await_earlier(spec.name, deadline)
            number = self._attempts.get(spec.name, -1) + 1
            bootstrap.publish("turn", b"%d" % number)
            return self._try(plan, number, deadline)

    def _init_lock(self, spec: CommSpec, deadline: Deadline) -> AbstractContextManager[None]:
        """Of all members, where the library can make only one at a time on a rank."""
        if not self._library.one_at_a_time:
            return nullcontext()
        return InitLock(self._control, self._library.name, spec.name, spec.ranks, deadline)

    def _receive_attempt(self, spec: CommSpec, bootstrap: Bootstrap, deadline: Deadline) -> int:
        """The number of the first member's attempt, a new one."""
        (first, *_), name = spec.ranks, spec.name
        while True:
            (said,) = bootstrap.wait_for("turn", (first,))
            if int(said) > self._attempts.get(name, -1):
                return int(said)
            if deadline.remaining == 0.0:
                raise CommunicatorFailed(
                    f"{name}: rank {first} is still in attempt {int(said)}, which failed here"
                )
            time.sleep(EARLIER_POLL_INTERVAL)

    def _try(self, plan: CommPlan, number: int, deadline: Deadline) -> CommStream:
        """One attempt. The members are asked whether they are ready before the library is: what it
        opens for a meeting that does not take place it never closes."""
        spec = plan.spec
        self._attempts[spec.name] = number
        if number:
            plan = replace(plan, spec=spec.for_attempt(number))
        question = f"{self._library.name}/{spec.name}/{number}"
        bootstrap = Bootstrap(self._control, question, spec.ranks, deadline)
        if spec.rank > 0:
            bootstrap.publish("ready")
        else:
            bootstrap.barrier("ready", spec.ranks)
        comm_stream = self._make(plan, bootstrap, deadline)
        # Not after a failure: whoever comes later goes on to the library, and hears its reason.
        with suppress(ControlError):
            bootstrap.withdraw()
        return comm_stream

    def _await_earlier(self, name: str, deadline: Deadline) -> None:
        """Wait until nothing is being made here that was given up, where the library needs that."""
        while self._library.one_at_a_time and (earlier := PENDING_COMMS.names()):
            self._drop_lost()
            if deadline.remaining == 0.0:
                raise CommunicatorFailed(
                    f"{name}: {self._library.title} is still making {earlier[0]}, "
                    "which was begun before and cannot be stopped"
                )
            time.sleep(EARLIER_POLL_INTERVAL)

    def _drop_lost(self) -> None:
        if PENDING_COMMS.names() and (loss := self._control.lost_rank(0.0)) is not None:
            PENDING_COMMS.forget_lost(self, loss.rank)

    def _make(self, plan: CommPlan, bootstrap: Bootstrap, deadline: Deadline) -> CommStream:
        name, title = plan.spec.name, self._library.title
        made: Future[CommStream] = Future()
        PENDING_COMMS.add(made, self, plan.spec)
        self._run_on_thread(lambda: self._init_and_warm_up(plan, bootstrap), made, name)
        try:
            comm_stream = made.result(deadline.remaining)
        except TimeoutError as error:
            made.add_done_callback(_keep_late_comm)
            raise CommunicatorFailed(f"{name}: {title} did not make it in time") from error
        except RuntimeError as error:
            why = " ".join(str(error).split())
            raise CommunicatorFailed(f"{name}: {title} did not make it: {why}") from error
        while (status := comm_stream.warmup.poll()) is OpStatus.IN_FLIGHT and deadline.remaining:
            time.sleep(POLL_INTERVAL)
        if status is OpStatus.DONE:
            return comm_stream
        UNRELEASED_COMMS.keep(comm_stream)
        raise CommunicatorFailed(f"{name}: the greeting did not end: {comm_stream.warmup.error}")

    def _init_and_warm_up(self, plan: CommPlan, bootstrap: Bootstrap) -> CommStream:
        """Its first operations may block until every member has called them."""
        plan.device.set_current()
        group, warmup = self._library.init_comm(plan.spec, plan.device, bootstrap, plan.warmup)
        return CommStream(plan.spec, self._library, group, plan.device, warmup)

    def _run_on_thread(
        self, call: Callable[[], CommStream], answer: Future[CommStream], name: str
    ) -> None:
        """On a thread of its own, for nobody can end the call."""

        def run() -> None:
            try:
                comm_stream = call()
            except BaseException as error:  # the caller hears it
                PENDING_COMMS.remove(answer)
                answer.set_exception(error)
            else:
                PENDING_COMMS.remove(answer)  # first: the caller may make the next one at once
                answer.set_result(comm_stream)

        title = f"equipoise.{self._library.name}.{name}"
        threading.Thread(target=NATIVE_CALL_GUARD(run), name=title, daemon=True).start()


def _keep_late_comm(made: Future[CommStream]) -> None:
    """It came too late: keep what was made."""
    if made.exception() is None:
        UNRELEASED_COMMS.keep(made.result())
