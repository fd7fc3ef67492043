"""Makes communicators of the library: agrees with the other members, bounds the wait, and warms up.

**Warm-up.** A library builds its connections with the first operations and blocks meanwhile. Each
kind of collective has connections of its own, and so has every pair of ranks in a batch. So every
kind is used once, by all ranks at once, before the communicator is used.

**Attempts.** If a communicator was not made in time, its members may try again under the same name.
Each then withdraws what it has published: a late rank must not take the "here" of an attempt that
was given up for that of a rank that waits. The first member numbers the attempts and publishes the
number under "turn"; all later messages, and the name that the library gets, contain it. A member
never joins an attempt twice, because the library's rendezvous may be used only once.
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
    """Use every kind of operation of a communicator once. The all-reduce comes last: it ends only
    when every member has called it, so its end means that all have done everything."""
    word, words = _zeros(1, torch.int32, device), _zeros(size, torch.int32, device)
    into, source = _zeros(size, torch.int8, device), _zeros(size, torch.int8, device)
    byte = _zeros(1, torch.int8, device)
    group.all_gather(into, byte)
    group.reduce_scatter(word, words)
    group.broadcast(byte, 0)
    group.all_to_all(into, source, (), ())
    group.all_to_all(into, source, [1] * size, [1] * size)
    peers = [peer for peer in range(size) if peer != rank]
    if peers:
        operations = ["irecv"] * len(peers) + ["isend"] * len(peers)
        blobs = [part[peer : peer + 1] for part in (into, source) for peer in peers]
        group.batch(operations, blobs, peers + peers)
    last = group.all_reduce(word)
    return WarmupOps(last, (word, words, into, source, byte), byte)


def warm_up_link(group: CclComm, rank: int, size: int, device: Any) -> WarmupOps:
    """Send a byte from rank 0 to rank 1."""
    byte = _zeros(1, torch.int8, device)
    handle = group.message("isend" if rank == 0 else "irecv", byte, 1 - rank)
    return WarmupOps(handle, (byte,), byte)


def _zeros(count: int, dtype: torch.dtype, device: Any) -> Tensor:
    return torch.zeros(count, dtype=dtype).to(device)


POLL_INTERVAL = 0.0005
"""Seconds between two polls of the warm-up: short, it ends within milliseconds once all are
there."""
EARLIER_POLL_INTERVAL = 0.005
"""Seconds between two polls of an earlier communicator that is still being made, or of the
attempt's number: these take tenths of a second, and the second is a request to the store."""


@dataclass(frozen=True)
class CommPlan:
    """A communicator that is to be made.

    Attributes:
        spec: of the group.
        warmup: its first operations.
        device: where it runs.
    """

    spec: CommSpec
    warmup: Warmup
    device: Device


class PendingComms:
    """Communicators of this process that are being made, also those that were given up.

    A library's call cannot be interrupted, so one that was given up goes on, and the next has to
    wait for it. Torch_npu takes the next stream of its pool for each communicator: of two made at
    once, one would run on a stream that is not its own, queued after whatever hangs there. And each
    first operation blocks torch_npu's launch queue until all members have issued it, so they must
    come in the same order on all ranks.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Future[CommStream], tuple[CommBuilder, CommSpec]] = {}

    def add(self, made: Future[CommStream], builder: "CommBuilder", spec: CommSpec) -> None:
        """Add a communicator that is being made."""
        with self._lock:
            self._under_way[made] = builder, spec

    def remove(self, made: Future[CommStream]) -> None:
        """Remove it: the library has returned, with or without a communicator."""
        with self._lock:
            self._under_way.pop(made, None)

    def forget_lost(self, builder: "CommBuilder", lost: int) -> None:
        """Forget what `builder` makes together with a lost rank: that never completes, and the
        survivors must be able to make others."""
        with self._lock:
            for future, (owner, spec) in list(self._under_way.items()):
                if owner is builder and lost in spec.ranks:
                    del self._under_way[future]

    def names(self) -> tuple[str, ...]:
        """Names of what is being made."""
        with self._lock:
            return tuple(spec.name for _, spec in self._under_way.values())


PENDING_COMMS = PendingComms()
"""Of this process, for all fabrics: there is one launch queue per process."""


class CommBuilder:
    """Makes the communicators of one fabric.

    Args:
        library: makes them.
        control: carries the bootstrap messages.
    """

    def __init__(self, library: Ccl, control: StoreControlPlane) -> None:
        self._library = library
        self._control = control
        self._given_up = threading.Event()
        self._attempts: dict[str, int] = {}
        """By name, for what could not be made yet: the last attempt that this rank joined."""

    def deadline(self, expiry: float) -> Deadline:
        """A deadline that also ends when the fabric closes."""
        return Deadline(expiry, self._given_up)

    def give_up(self) -> None:
        """End all waits: the fabric closes, and what is being made will not be used."""
        self._given_up.set()
        self._drop_lost()  # now: the control plane is about to be closed

    def build(self, plan: CommPlan, deadline: Deadline) -> CommStream:
        """Make a communicator together with all its members, each of which calls this.

        After a failure all of them may call it again. Raises `CommunicatorFailed` when a member is
        late, with its rank, or when a communicator that was given up is still being made.
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
                f"{name}: not all ranks joined in time: rank(s) {error.missing} are missing"
            ) from error
        except ControlError as error:
            raise CommunicatorFailed(f"{name}: {error}") from error
        finally:
            # After a success every member has read everything, since its warm-up has ended. After a
            # failure a late rank must not find the messages of this attempt.
            with suppress(ControlError):
                bootstrap.withdraw()
        self._attempts.pop(name, None)
        return comm_stream

    def _agree_on_attempt(
        self, plan: CommPlan, bootstrap: Bootstrap, deadline: Deadline
    ) -> CommStream:
        """Wait for all members, agree on the number of the attempt, and make it."""
        spec = plan.spec
        bootstrap.barrier("here", spec.ranks)
        if spec.rank > 0:
            number = self._receive_attempt(spec, bootstrap, deadline)
            self._await_earlier(spec.name, deadline)
            return self._try(plan, number, deadline)
        # Only the first member takes the locks: it takes those of all members, in rank order.
        with self._init_lock(spec, deadline):
            self._await_earlier(spec.name, deadline)
            number = self._attempts.get(spec.name, -1) + 1
            bootstrap.publish("turn", b"%d" % number)
            return self._try(plan, number, deadline)

    def _init_lock(self, spec: CommSpec, deadline: Deadline) -> AbstractContextManager[None]:
        """The locks of all members, if the library makes only one communicator at a time."""
        if not self._library.one_at_a_time:
            return nullcontext()
        return InitLock(self._control, self._library.name, spec.name, spec.ranks, deadline)

    def _receive_attempt(self, spec: CommSpec, bootstrap: Bootstrap, deadline: Deadline) -> int:
        """The number of the first member's attempt, which this rank has not joined before."""
        (first, *_), name = spec.ranks, spec.name
        while True:
            (attempt,) = bootstrap.wait_for("turn", (first,))
            if int(attempt) > self._attempts.get(name, -1):
                return int(attempt)
            if deadline.remaining == 0.0:
                raise CommunicatorFailed(
                    f"{name}: rank {first} is still in attempt {int(attempt)}, which failed here"
                )
            time.sleep(EARLIER_POLL_INTERVAL)

    def _try(self, plan: CommPlan, number: int, deadline: Deadline) -> CommStream:
        """One attempt. The members confirm that they are ready before the library is called: what
        it opens for a rendezvous that does not take place is never closed."""
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
        # Not after a failure: a member that is late goes on to the library and gets its error.
        with suppress(ControlError):
            bootstrap.withdraw()
        return comm_stream

    def _await_earlier(self, name: str, deadline: Deadline) -> None:
        """Wait until no earlier communicator is being made, if the library needs that."""
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
        future: Future[CommStream] = Future()
        PENDING_COMMS.add(future, self, plan.spec)
        self._run_on_thread(lambda: self._init_and_warm_up(plan, bootstrap), future, name)
        try:
            comm_stream = future.result(deadline.remaining)
        except TimeoutError as error:
            future.add_done_callback(_keep_late_comm)
            raise CommunicatorFailed(f"{name}: {title} did not make it in time") from error
        except RuntimeError as error:
            why = " ".join(str(error).split())
            raise CommunicatorFailed(f"{name}: {title} did not make it: {why}") from error
        while (status := comm_stream.warmup.poll()) is OpStatus.IN_FLIGHT and deadline.remaining:
            time.sleep(POLL_INTERVAL)
        if status is OpStatus.DONE:
            return comm_stream
        UNRELEASED_COMMS.keep(comm_stream)
        raise CommunicatorFailed(f"{name}: the warm-up did not end: {comm_stream.warmup.error}")

    def _init_and_warm_up(self, plan: CommPlan, bootstrap: Bootstrap) -> CommStream:
        """Runs on a thread: the first operations may block until every member has called them."""
        plan.device.set_current()
        group, warmup = self._library.init_comm(plan.spec, plan.device, bootstrap, plan.warmup)
        return CommStream(plan.spec, self._library, group, plan.device, warmup)

    def _run_on_thread(
        self, call: Callable[[], CommStream], answer: Future[CommStream], name: str
    ) -> None:
        """Run `call` on a thread of its own, because it cannot be interrupted."""

        def run() -> None:
            try:
                comm_stream = call()
            except BaseException as error:  # raised by `answer.result`
                PENDING_COMMS.remove(answer)
                answer.set_exception(error)
            else:
                # Before the result is set: the caller may make the next one at once.
                PENDING_COMMS.remove(answer)
                answer.set_result(comm_stream)

        title = f"equipoise.{self._library.name}.{name}"
        threading.Thread(target=NATIVE_CALL_GUARD(run), name=title, daemon=True).start()


def _keep_late_comm(future: Future[CommStream]) -> None:
    """Keep a communicator that was made after its caller gave up, until it can be released."""
    if future.exception() is None:
        UNRELEASED_COMMS.keep(future.result())
