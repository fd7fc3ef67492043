"""One rank: opens fabrics and plays cases, on request.

Requests and replies are JSON. Requests: `{"do": "greet"}`,
`{"do": "open", "fabric": NAME, "where": RENDEZVOUS, "holder": PID or null}`,
`{"do": "play", "fabric": NAME, "property": REFERENCE, "case": CASE, "number": N}`,
`{"do": "gauge", "fabric": NAME, "number": N}`: measure the seconds of opening a communicator;
`{"do": "tidy"}`: close what the last case left open, as the beginning of every request does;
`{"do": "close", "fabric": NAME}`, `{"do": "rest"}` when nothing is open any more, and
`{"do": "hold"}`, to a process that is to hold a store: it answers with the host and the port.
Replies: `{"answers": [...]}` of the rank's threads, or `{"fault": [BLAME, CLAUSE or null, TEXT]}`;
with `"unclosed": TEXT` where a communicator of the last case could not be closed.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from equipoise.hal import registry
from equipoise.hal.accelerator import Backend, open_for_rank
from equipoise.hal.capabilities import Operation
from equipoise.hal.communicator import (
    Communicator,
    CommunicatorBackend,
    Fabric,
    Rendezvous,
    RendezvousHost,
)
from equipoise.hal.conformance.clauses import SIGNATURES
from equipoise.hal.conformance.context import RankContext
from equipoise.hal.conformance.executors.device import WAIT_TIMEOUT, DeviceEnvironment, play_threads
from equipoise.hal.conformance.executors.leak_detector import LeakDetector
from equipoise.hal.conformance.executors.property_reference import resolve_property
from equipoise.hal.conformance.executors.worker_process import serve_requests
from equipoise.hal.conformance.program import Case, case_from_json
from equipoise.hal.conformance.subject import describe_error, missing_member
from equipoise.hal.errors import CommunicatorError, ControlError, Violation
from equipoise.hal.expert_parallel import ExpertParallelLibrary

WAIT_SLACK = 5.0
"""Seconds beyond the deadline of an operation that a wait for its end may take: where opening takes
long, a short deadline is long."""
RankRequest = dict[str, Any]
RankReply = dict[str, Any]


class FaultPriority(IntEnum):
    """Which fault of several ranks is reported: the lowest."""

    VIOLATION = 0
    RAISED = 1
    PEER_FAILED = 2
    """What a rank raises when another one has left it alone."""


@dataclass(frozen=True)
class _FabricEntry:
    """A fabric, where it met, and the process that holds its store if that may be ended."""

    fabric: Fabric
    rendezvous: Rendezvous
    store_pid: int | None


@dataclass
class _TrackingEnvironment(DeviceEnvironment):
    """Keeps what a case opened, so that it can be closed when no rank needs it any more."""

    communicators: list[Communicator] = field(default_factory=list)
    failed_closes: list[str] = field(default_factory=list)

    def open(self, purpose: str, ranks: Sequence[int] | None) -> Communicator:
        communicator = super().open(purpose, ranks)
        self.communicators.append(communicator)
        return communicator

    def close(self, communicator: Communicator) -> None:
        note_failed_close(communicator, self.failed_closes)


def note_failed_close(communicator: Communicator, errors: list[str]) -> None:
    """Close it; what it raises is no error of what is played, and is added to `errors`."""
    try:
        communicator.close()
    except Exception as error:
        if missing_member(error) is not None:
            raise
        errors.append(f"closing a communicator {describe_error(error)}")


class RankWorker:
    """One rank of a subject; handles one request at a time.

    Args:
        backend: of its device.
        communicator: connects it with the others.
        library: the expert-parallel library that is judged, if one is.
    """

    def __init__(
        self,
        backend: Backend,
        communicator: CommunicatorBackend,
        library: ExpertParallelLibrary | None = None,
    ) -> None:
        self._backend = backend
        self._communicator = communicator
        self._library = library
        self._fabrics: dict[str, _FabricEntry] = {}
        self._rendezvous_hosts: list[RendezvousHost] = []
        self._leftovers: list[Communicator] = []
        self._failed_closes: list[str] = []
        self._leaks = LeakDetector()

    def handle(self, order: RankRequest) -> RankReply:
        """Do it; what is raised becomes a part of the answer."""
        reply = self._handle(order)
        if self._failed_closes:
            reply["unclosed"] = self._failed_closes[0]
            self._failed_closes.clear()
        return reply

    def _handle(self, order: RankRequest) -> RankReply:
        operations: dict[str, Callable[[RankRequest], list[Any]]] = {
            "greet": lambda _: [],
            "tidy": lambda _: [],
            "hold": self._hold_store,
            "open": self._open,
            "play": self._play,
            "gauge": self._measure_open_time,
            "close": self._close,
            "rest": self._check_leaks,
        }
        try:
            self._close_leftovers()
            return {"answers": operations[order["do"]](order)}
        except Violation as violation:
            clause = violation.clause
            text = str(violation).removeprefix(f"{clause}: ")
            return {"fault": [FaultPriority.VIOLATION, clause, text]}
        except (CommunicatorError, ControlError) as error:
            return {"fault": [FaultPriority.PEER_FAILED, None, describe_error(error)]}
        except Exception as error:
            missing = missing_member(error)
            if missing is not None:
                return {"fault": [FaultPriority.VIOLATION, SIGNATURES, missing]}
            return {"fault": [FaultPriority.RAISED, None, describe_error(error)]}

    def _open(self, order: RankRequest) -> list[Any]:
        where = Rendezvous(**order["where"])
        fabric = self._communicator.connect(where)
        self._fabrics[order["fabric"]] = _FabricEntry(fabric, where, order["holder"])
        return []

    def _hold_store(self, _: RankRequest) -> list[Any]:
        self._rendezvous_hosts.append(self._communicator.host())
        return list(self._rendezvous_hosts[-1].address)

    def _close(self, order: RankRequest) -> list[Any]:
        self._fabrics.pop(order["fabric"]).fabric.close()
        return []

    def _check_leaks(self, _: RankRequest) -> list[Any]:
        self._leaks.check_released()
        return []

    def _play(self, order: RankRequest) -> list[Any]:
        place = self._fabrics[order["fabric"]]
        accelerator = open_for_rank(self._backend, place.rendezvous.rank)
        try:
            case = case_from_json(order["case"])
            prefix = f"case{order['number']}/"
            environment = _TrackingEnvironment(
                accelerator, case.schedule, place.fabric, prefix, place.store_pid
            )
            self._leftovers = environment.communicators
            environment.failed_closes = self._failed_closes
            ctx = self._rank_context(environment, place.rendezvous, case)
            prop = resolve_property(order["property"])
            if prop.large:
                self._leaks.expect_growth()
            return play_threads(prop, case, ctx)
        finally:
            self._leaks.note_shm_names()
            accelerator.close()

    def _measure_open_time(self, order: RankRequest) -> list[Any]:
        """The second one counts: the first one finds libraries asleep."""
        place = self._fabrics[order["fabric"]]
        accelerator = open_for_rank(self._backend, place.rendezvous.rank)
        try:
            for count in (1, 2):
                began = time.monotonic()
                communicator = place.fabric.open(f"gauge{order['number']}/{count}")
                self._leftovers.append(communicator)
                if Operation.BARRIER in communicator.capabilities.operations:
                    communicator.barrier().result(WAIT_TIMEOUT)
            return [time.monotonic() - began]
        finally:
            accelerator.close()

    def _close_leftovers(self) -> None:
        """Close what the last case left open: by now every rank has ended that case."""
        while self._leftovers:
            note_failed_close(self._leftovers.pop(), self._failed_closes)

    def _rank_context(
        self, environment: DeviceEnvironment, where: Rendezvous, case: Case
    ) -> RankContext:
        return RankContext(
            rank=where.rank,
            size=case.program.size,
            thread=0,
            backend=self._backend,
            accelerator=environment.accelerator,
            fabric=environment.fabric,
            deadline=where.deadline,
            timeout=max(WAIT_TIMEOUT, where.deadline + WAIT_SLACK),
            environment=environment,
            library=self._library,
        )


def make_worker(backend: str, communicator: str, library: str | None = None) -> RankWorker:
    """A rank of what these names mean. Raises `BackendUnavailable`."""
    return RankWorker(
        registry.accelerator(backend),
        registry.communicator(communicator),
        registry.expert_parallel(library) if library else None,
    )


def main() -> None:
    """Serve as a rank of what the command line names: accelerator, communicator, and a library."""
    serve_requests(make_worker(*sys.argv[1:4]).handle)


if __name__ == "__main__":
    main()
