"""MPI in this process: initialised once, for any thread, and finalised at exit."""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeVar

from equipoise import install_command
from equipoise.hal.errors import BackendUnavailable, ControlPlaneLost

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
LAUNCHERS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
"""Set by mpiexec in the processes it starts: MPICH and Slurm, PMIx, Open MPI."""
POLL_INTERVAL = 0.005
"""Seconds between two polls of waits at start and exit, which need not be fast; MPI's own waits
spin."""
NOTE_BYTES = 512
"""Bytes of the message that `broadcast_note` sends: an address and a reason."""
FINALIZE_TIMEOUT = 20.0
"""Maximum seconds that MPI may take to finalise while it still holds operations that never ended;
then the process is ended. MPICH finalises all the same, in more than 5 s on a busy machine; another
library may hang."""
INSTALL_HINT = install_command("mpi")
"""What helps where there is no MPI."""
SEGMENTS = re.compile(r"(/dev/shm/mpich_shm_\w+)")


class ClosedBeforeFinalize(Protocol):
    """An object that is closed before MPI is finalised."""

    def close(self) -> None:
        """Close it; must not block for ever."""
        ...


class MpiWorld:
    """All processes of the launch. Use `enter`.

    Attributes:
        mpi: mpi4py's module.
        rank: of this process.
        size: how many processes.
        open_fabrics: what is closed before MPI ends.
        never_released: what MPI never let go of; kept for ever.
    """

    def __init__(self, mpi: ModuleType, deadline: float) -> None:
        self.mpi = mpi
        self.open_fabrics: list[ClosedBeforeFinalize] = []
        self.never_released: list[object] = []
        self._in_step = True
        self._owns_mpi = not mpi.Is_initialized()
        if self._owns_mpi:
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise BackendUnavailable("MPI was initialised without MPI_THREAD_MULTIPLE")
        self._all, request = mpi.COMM_WORLD.Idup()
        self._all.Set_errhandler(mpi.ERRORS_RETURN)
        self._wait_for(request, deadline, "joining")
        self.rank: int = self._all.rank
        self.size: int = self._all.size
        self._unlink(deadline)
        atexit.register(self._end)

    def broadcast_note(self, note: str, timeout: float) -> str:
        """Rank 0's `note`, on every rank; all of them call it.

        Raises `ControlPlaneLost` when rank 0 does not come within `timeout` seconds.
        """
        buffer = bytearray(note.encode().ljust(NOTE_BYTES))
        self._wait_for(self._all.Ibcast(buffer, 0), timeout, "joining", buffer)
        return buffer.decode().rstrip()

    def make_communicators(
        self, ranks: Sequence[int], tag: int, timeout: float
    ) -> tuple[MPI.Intracomm, MPI.Intracomm]:
        """Two communicators among `ranks`, whose processes are all known to be calling this.

        MPI has no bounded way to make one. Raises `TimeoutError` after `timeout` seconds, and
        leaves the thread behind that waits for MPI.
        """

        def make() -> tuple[MPI.Intracomm, MPI.Intracomm]:
            members = self._all.group.Incl(ranks)
            communicators = (
                self._all.Create_group(members, tag),
                self._all.Create_group(members, tag),
            )
            members.Free()
            for communicator in communicators:
                communicator.Set_errhandler(self.mpi.ERRORS_RETURN)
            return communicators

        return self._in_time(make, timeout)

    def _in_time(self, call: Callable[[], T], timeout: float) -> T:
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:  # raised to the caller
                answer.set_exception(error)

        thread = threading.Thread(target=run, name="equipoise.mpi.form", daemon=True)
        thread.start()
        try:
            return answer.result(timeout)
        except TimeoutError:
            self.never_released.append(thread)
            raise

    def _wait_for(
        self, request: MPI.Request, timeout: float, purpose: str, *buffers: object
    ) -> None:
        expiry = time.monotonic() + timeout
        while not request.Test():
            if time.monotonic() >= expiry:
                self.never_released.append((request, buffers))
                self._in_step = False
                raise ControlPlaneLost(
                    f"the ranks did not all come within {timeout:g} s: {purpose}"
                )
            time.sleep(POLL_INTERVAL)

    def _unlink(self, timeout: float) -> None:
        """Unlink MPICH's shared memory as soon as every rank has mapped it.

        It leaves them behind when a job is killed, and with them the memory until the next boot.
        """
        self._wait_for(self._all.Ibarrier(), timeout, "joining")
        for segment in set(SEGMENTS.findall(Path("/proc/self/maps").read_text())):
            Path(segment).unlink(missing_ok=True)

    def _end(self) -> None:
        for fabric in tuple(self.open_fabrics):
            fabric.close()
        if not self._owns_mpi or self.mpi.Is_finalized():
            return
        if self._in_step:
            self._wait_for(self._all.Ibarrier(), math.inf, "leaving")
        if self.never_released:
            faulthandler.dump_traceback_later(FINALIZE_TIMEOUT, exit=True)
        self.mpi.Finalize()


def started_by_mpiexec() -> bool:
    """Whether an mpiexec started this process; nothing is initialised."""
    return any(name in os.environ for name in LAUNCHERS)


def join_world(deadline: float) -> MpiWorld:
    """This process's world; the first call initialises MPI, in every process of the launch.

    Raises:
        BackendUnavailable: there is no MPI, or it was initialised for one thread only.
        ControlPlaneLost: the other processes did not come within `deadline` seconds.
    """
    global _world
    with _entering:
        if _world is None:
            _world = MpiWorld(_library(), deadline)
        return _world


def _library() -> ModuleType:
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # else the import initialises MPI, for one thread only
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter: no MPI library was found
        raise BackendUnavailable(f"no MPI here: {error}; {INSTALL_HINT}") from error
    return MPI


_entering = threading.Lock()
_world: MpiWorld | None = None
