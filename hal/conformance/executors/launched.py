"""Plays cases on ranks that the communicator's own launcher started, this process included.

Rank 0 runs hypothesis and is a rank itself. It broadcasts each request through the control plane of
a fabric of all ranks, every rank that is named in it obeys, and rank 0 collects the replies before
the next request. Only ballots are used for that, so nothing under test has to work for it.
"""

import json
import sys
import threading
import traceback
from collections.abc import Collection, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any

from equipoise.hal import registry
from equipoise.hal.communicator import Rendezvous, RendezvousHost
from equipoise.hal.conformance.executors.multi_rank import (
    DEADLINES,
    DisposableStore,
    GatherOptions,
    MultiRankSubject,
)
from equipoise.hal.conformance.executors.processes import declared_traits
from equipoise.hal.conformance.executors.rank_worker import (
    FaultPriority,
    RankReply,
    RankRequest,
    RankWorker,
    make_worker,
)
from equipoise.hal.conformance.property import DeadlineLength
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import BallotIncomplete, ControlPlaneLost, Unsupported, Violation

REQUEST_POLL_TIMEOUT = 2.0
"""Seconds of one wait for the next request; between waits a rank checks that rank 0 lives."""
SILENT = 15
"""Consecutive waits that must find rank 0 lost before a rank gives up: a heartbeat may be late."""
REPLY_GRACE = 10.0
"""Seconds beyond the watchdog of a request that its reply may take to arrive."""


class LaunchedRankGroup:
    """All ranks of the launch, as rank 0 sees them.

    Args:
        backend: the accelerator backend by name, or PACKAGE:OBJECT.
        communicator: the communicator backend, likewise.
        where: what `CommunicatorBackend.launcher_rendezvous` returned on rank 0.
        library: the expert-parallel library that is judged, if one is.
    """

    def __init__(
        self, backend: str, communicator: str, where: Rendezvous, library: str | None = None
    ) -> None:
        self._communicator = registry.communicator(communicator)
        self._seat = make_worker(backend, communicator, library)
        self._fabric = self._communicator.connect(where)
        self._count = 0

    def open_store(self) -> RendezvousHost:
        """Open another store in this process."""
        return self._communicator.host()

    def open_disposable_store(self) -> DisposableStore:
        """Not possible: there are the processes of the launch, and no other."""
        raise Unsupported("no process of a launch may be ended")

    def request(
        self, orders: Mapping[int, RankRequest], call: GatherOptions
    ) -> dict[int, RankReply]:
        """What the ranks answer; its own answer is made here."""
        self._broadcast({"orders": dict(orders), "watchdog": call.watchdog})
        answers: dict[int, RankReply] = {}
        # After the broadcast: what a request does may take all ranks at once.
        if 0 in orders:
            answers[0] = handle_with_timeout(self._seat, orders[0], call.watchdog)
        return answers | self._collect(orders.keys() - {0}, call.watchdog + REPLY_GRACE)

    def replace(self, ranks: Collection[int]) -> None:
        """Not possible: the launcher started them, once."""
        raise Unsupported(f"ranks {sorted(ranks)} were started by the communicator's launcher")

    def close(self) -> None:
        """Dismiss the other ranks and wait for their replies: the store may end with this rank."""
        self._broadcast({"orders": {}, "end": True})
        with suppress(Violation, ControlPlaneLost):
            self._collect(set(range(1, self._fabric.control.size)), REPLY_GRACE)
        self._fabric.close()

    def _broadcast(self, order: dict[str, Any]) -> None:
        self._count += 1
        self._fabric.control.cast(f"order/{self._count}", json.dumps(order).encode())

    def _collect(self, ranks: Set[int], timeout: float) -> dict[int, RankReply]:
        sorted_ranks = sorted(ranks)
        if not sorted_ranks:
            return {}
        try:
            replies = self._fabric.control.collect(f"answer/{self._count}", timeout, sorted_ranks)
        except BallotIncomplete as incomplete:
            missing = ", ".join(map(str, incomplete.missing))
            raise Violation("C8", f"no answer at all from rank(s) {missing}") from incomplete
        return dict(zip(sorted_ranks, map(json.loads, replies), strict=True))


class LaunchedSubject(MultiRankSubject):
    """An accelerator and a communicator on the ranks of a launch; for rank 0.

    Args:
        backend: the accelerator backend by name, or PACKAGE:OBJECT.
        communicator: the communicator backend, likewise.
        where: what `CommunicatorBackend.launcher_rendezvous` returned on rank 0.
        deadlines: seconds that an operation may last, by length of the deadline.
        library: the expert-parallel library that is judged, if one is.
    """

    def __init__(
        self,
        backend: str,
        communicator: str,
        where: Rendezvous,
        deadlines: Mapping[DeadlineLength, float] = DEADLINES,
        library: str | None = None,
    ) -> None:
        rank_group = LaunchedRankGroup(backend, communicator, where, library)
        traits = declared_traits(backend, communicator, where.size, library)
        declared = replace(traits, can_end_ranks=False)
        name = f"{backend} with {communicator} on {where.size} launched ranks"
        super().__init__(name, declared, rank_group, deadlines)


def serve_rank(
    backend: str, communicator: str, where: Rendezvous, library: str | None = None
) -> None:
    """Be a rank other than 0, until rank 0 says that this is the end.

    Raises `ControlPlaneLost` when rank 0 or the store ends without dismissing this rank.
    """
    worker = make_worker(backend, communicator, library)
    fabric = registry.communicator(communicator).connect(where)
    try:
        count = 1
        while "end" not in (line := _next_request(fabric.control, f"order/{count}")):
            if str(where.rank) in line["orders"]:
                answer = handle_with_timeout(
                    worker, line["orders"][str(where.rank)], line["watchdog"]
                )
                fabric.control.cast(f"answer/{count}", json.dumps(answer).encode())
            count += 1
        fabric.control.cast(f"answer/{count}", b"{}")
    finally:
        fabric.close()


def handle_with_timeout(worker: RankWorker, order: RankRequest, watchdog: float) -> RankReply:
    """Handle a request; after `watchdog` seconds reply with a fault that quotes the stack.

    Ending one rank of a foreign launcher would end all. So each request runs in its own thread,
    and the rank abandons a thread that hangs and continues.
    """
    answers: list[RankReply] = []
    thread = threading.Thread(target=lambda: answers.append(worker.handle(order)), daemon=True)
    thread.start()
    thread.join(watchdog)
    if answers:
        return answers[0]
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "it has died"
    return {"fault": [FaultPriority.VIOLATION, "C8", f"no answer within {watchdog:g} s:\n{stack}"]}


def _next_request(control: ControlPlane, question: str) -> dict[str, Any]:
    """Wait for the next request, as long as rank 0 lives."""
    silent = 0
    while silent < SILENT:
        try:
            (line,) = control.collect(question, REQUEST_POLL_TIMEOUT, [0])
        except BallotIncomplete:
            loss = control.lost_rank(0.0)
            silent = silent + 1 if loss is not None and loss.rank == 0 else 0
            continue
        except ControlPlaneLost:
            # Late, or gone. These ranks cannot be replaced: one late answer must not end the suite.
            silent += 1
            continue
        request: dict[str, Any] = json.loads(line)
        return request
    raise ControlPlaneLost("rank 0 is silent, and gives no more orders")
