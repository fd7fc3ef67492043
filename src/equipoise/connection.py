"""The ranks of this run: opens this process's device, and meets the other ranks.

    with equipoise.connect() as ranks:
        print(ranks.rank, ranks.size, ranks.device)

Which ranks there are, and where their store lives: docs/design/api.md.
"""

import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from equipoise.balancer.experts.closing import close_quietly
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator, Backend, check_device_count, open_for_rank
from equipoise.hal.arguments import positive_seconds
from equipoise.hal.capabilities import Unavailable
from equipoise.hal.communicator import Fabric, Rendezvous, RendezvousHost
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import (
    BackendUnavailable,
    BallotIncomplete,
    CommunicatorError,
    ConfigError,
    ControlPlaneLost,
    RankLost,
    StreamFailed,
)
from equipoise.hal.stream import Role, Stream

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""`True` where the launcher holds the store; torchrun's word, and said by our launcher too."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""torchrun's static rendezvous keeps one store over restarts: keys of the run before are in it."""
ATTRIBUTION = 3.0
"""Seconds to wait for evidence of who was lost. A rank counts as silent after two."""
_numbers = itertools.count()
"""Every rank connects as often as every other, so that they number their connections alike."""


def connect(
    backend: str = "cpu", communicator: str | None = None, *, deadline: float = 60.0
) -> "Connection":
    """Open this rank's device and meet the other ranks; every rank of the run calls it.

    The ranks are found in the environment: `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`,
    which torchrun sets; else what the communicator's own launcher says, as mpiexec does with
    communicator `mpi`; else this process is the only rank. Of several devices on a node, rank r
    takes number r modulo their count.

    Args:
        backend: accelerator, by a name that `equipoise doctor` lists, or as PACKAGE:OBJECT.
        communicator: likewise; the one that goes with the backend where none is named.
        deadline: seconds that any wait for another rank may last.

    Raises:
        ConfigError: the deadline is not above 0, or not finite.
        BackendUnavailable: the backend or the communicator is unknown, or cannot run here.
        UsageError: this node has fewer devices than ranks, and the communicator takes one each.
        ControlPlaneLost: the variables are incomplete, or nobody holds a store where they say.
    """
    number = next(_numbers)  # first: a call that fails counts on every rank
    deadline = positive_seconds("deadline", deadline, ConfigError)
    device_backend = available(backend)
    links = registry.communicator(communicator or device_backend.communicator)
    if isinstance(probed := links.probe(), Unavailable):
        raise BackendUnavailable(f"{links.name} cannot run here: {probed.reason}")
    where, host = find_rendezvous(links.name, deadline), None
    check_device_count(device_backend, links, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if where is None:
        host = links.host()
        name, port = host.address
        where = Rendezvous(rank=0, size=1, host=name, port=port, deadline=deadline)
    where = replace(where, namespace=f"{where.namespace}{number}/")
    fabric = links.connect(where)
    try:
        accelerator = open_for_rank(device_backend, where.rank)
    except BaseException as error:
        fabric.control.announce_exit(f"failed ({error})")
        fabric.close()
        raise
    return Connection(accelerator, fabric, deadline, host)


class Connection:
    """This rank, its device, and its connection to the other ranks. Made by `connect`.

    A context manager. A block that ends well is left by all ranks together: its end is a barrier.
    From a block that raises because another rank was lost, `RankLost` comes instead, which names
    that rank. Closing ends the device's streams and all communicators.

    Attributes:
        rank: of this process, from 0.
        size: how many ranks there are.
        device: `torch.device` of tensors that the ranks exchange.
        accelerator: the opened device (`equipoise.hal.Accelerator`).
        fabric: `fabric.open(purpose)` makes a communicator among all ranks; every rank opens the
            same purposes in the same order.
        compute: the stream that the model computes on: `compute.launch(program)` enqueues a
            callable, `compute.synchronize(seconds)` waits for what was launched.
        deadline: seconds that any wait for another rank may last.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        fabric: Fabric,
        deadline: float,
        host: RendezvousHost | None = None,
    ) -> None:
        self.rank: int = fabric.control.rank
        self.size: int = fabric.control.size
        self.device: torch.device = accelerator.device
        self.accelerator: Accelerator = accelerator
        self.fabric: Fabric = fabric
        self.compute: Stream = accelerator.stream(Role.COMPUTE)
        self.deadline: float = deadline
        self._host = host
        self._barriers = 0
        self._closed = False

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank has come here; on the host, whatever streams still run.

        Args:
            timeout: seconds; the connection's deadline where none are given.

        Raises:
            BallotIncomplete: names the ranks that did not come in time.
            ControlPlaneLost: the store does not answer.
        """
        control, number = self.fabric.control, self._barriers
        self._barriers += 1
        control.cast(f"barrier/{number}", b"")
        control.collect(f"barrier/{number}", self.deadline if timeout is None else timeout)
        if number:
            # Whoever came to this barrier has read the ballots of the one before.
            control.forget(f"barrier/{number - 1}", (self.rank,))

    def close(self) -> None:
        """End all communicators and the device's streams; bounded, and again is harmless.

        Waits for no other rank. Rank 0 may hold the store: leave the `with` block instead, or call
        `barrier` first.
        """
        if self._closed:
            return
        self._closed = True
        self.fabric.close()
        self.accelerator.close()
        if self._host is not None:
            self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._closed:
            return
        try:
            if isinstance(error, Exception):
                self._explain(error)
            elif error is not None:
                self.fabric.control.announce_exit(f"stopped ({type(error).__name__})")
            else:
                self._leave()
        except BaseException:
            close_quietly([self])
            raise
        if error is None:
            self.close()
        else:
            close_quietly([self])  # what closing raises is a consequence, and must not hide it

    def _leave(self) -> None:
        """Leave together; rank 0 last, in case it holds the store."""
        try:
            self.barrier()
            if self.rank:
                self.fabric.control.cast("left", b"")
            else:
                self.fabric.control.collect("left", self.deadline, range(1, self.size))
        except Exception as error:
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        """Raise the loss of a rank that explains `error`; else say why this one leaves."""
        cause = blame(self.fabric.control, error, min(ATTRIBUTION, self.deadline))
        if isinstance(cause, RankLost) and cause is not error:
            raise cause from error


def available(backend: str) -> Backend:
    """The accelerator backend of that name. Raises `BackendUnavailable` where it cannot run."""
    device_backend = registry.accelerator(backend)
    if isinstance(probed := device_backend.probe(), Unavailable):
        raise BackendUnavailable(f"{backend} cannot run here: {probed.reason}")
    return device_backend


def is_launched() -> bool:
    """Whether a launcher has started this process as a rank: `torchrun`, or see `join_launcher`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def find_rendezvous(communicator: str, deadline: float) -> Rendezvous | None:
    """Where the ranks meet that a launcher started; None where this process is by itself.

    Raises: as `rendezvous_from`, and as `CommunicatorBackend.launcher_rendezvous`.
    """
    if is_launched():
        return rendezvous_from(os.environ, deadline)
    rendezvous = registry.communicator(communicator).launcher_rendezvous()
    return None if rendezvous is None else replace(rendezvous, deadline=deadline)


def rendezvous_from(environment: Mapping[str, str], deadline: float) -> Rendezvous:
    """Where torchrun, or our launcher, says that the ranks meet.

    Where no launcher holds a store, rank 0 does.

    Raises:
        ControlPlaneLost: the environment is incomplete.
    """
    restarts = environment.get(RESTARTS)
    try:
        return Rendezvous(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            host=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            deadline=deadline,
            namespace="" if restarts is None else f"equipoise/{restarts}/",
            hosts_store=environment.get(AGENT_STORE) != "True" and int(environment["RANK"]) == 0,
        )
    except (KeyError, ValueError) as error:
        raise ControlPlaneLost(
            f"RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is missing or invalid: {error}"
        ) from error


def join_launcher(communicator: str) -> None:
    """Where the communicator's own launcher (mpiexec) started this process, be the rank it made.

    The environment then says so in torchrun's words, so that everything asks in one way. Without
    such a launcher, and under torchrun, nothing is done. Collective among the ranks of a launch.

    Raises: as `CommunicatorBackend.launcher_rendezvous`.
    """
    rendezvous = (
        None if is_launched() else registry.communicator(communicator).launcher_rendezvous()
    )
    if rendezvous is not None:
        os.environ.update(
            RANK=str(rendezvous.rank),
            WORLD_SIZE=str(rendezvous.size),
            MASTER_ADDR=rendezvous.host,
            MASTER_PORT=str(rendezvous.port),
        )


def blame(control: ControlPlane, error: Exception, timeout: float) -> Exception:
    """The loss of a rank that explains `error`; otherwise this rank leaves, and says why.

    Args:
        control: where evidence is.
        error: what ended this rank's work.
        timeout: seconds to wait for evidence.
    """
    failed = isinstance(error, StreamFailed) and isinstance(error.__cause__, Exception)
    cause = error.__cause__ if failed else error
    assert isinstance(cause, Exception)
    missed = isinstance(cause, CommunicatorError | BallotIncomplete)
    loss = control.lost_rank(timeout) if missed else None
    if loss is None:
        control.announce_exit(f"failed ({cause})")
        return cause
    return RankLost(loss.rank, loss.reason, f"{loss.operation}: {cause}")
