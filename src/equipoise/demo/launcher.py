"""Starts the rank processes of a run on one machine, watches them, and ends every one of them."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from equipoise.connection import AGENT_STORE, available, is_launched, rendezvous_from
from equipoise.demo.progress import RunProgress
from equipoise.demo.rank import record_rank, serve_rank
from equipoise.demo.run_record import RunRecord, load_record
from equipoise.demo.settings import RecordingSettings, RunSettings
from equipoise.demo.temporary_folder import temporary_folder
from equipoise.demo.traffic import load_phases
from equipoise.demo.worker import RankTask
from equipoise.hal import registry
from equipoise.hal.communicator import RendezvousHost
from equipoise.hal.errors import ControlError, EquipoiseError, RankLost

POLL = 0.05
"""Seconds between two looks at the ranks."""
CHECK = 0.5
"""Seconds between two looks at the heartbeats."""
MAX_SILENCE = 0.85
"""The part of the deadline that a rank may be silent; its peers notice earlier, and know more."""
START = 180.0
"""Seconds until a rank's first heartbeat: it has to import torch, which took over 60 s on a machine
with twenty busy processes per core."""
GRACE = 0.1
"""The part of the deadline that ranks get to end by themselves after the first one failed."""


class RankProcesses:
    """Starts one process a rank; on leaving the context every one of them has ended.

    Args:
        task: sent to each rank.
        host: their rendezvous; the death of a rank is reported to it.
        progress: gets what rank 0 reports.
    """

    def __init__(self, task: RankTask, host: RendezvousHost, progress: RunProgress) -> None:
        self._task = task
        self._host = host
        self._progress = progress
        self._selector = selectors.DefaultSelector()
        self._faults: dict[int, dict[str, Any]] = {}
        self._killed: dict[int, str] = {}
        self._beats = [(0, time.monotonic())] * task.settings.ranks
        self._next_check = 0.0
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "RankProcesses":
        try:
            for rank in range(self._task.settings.ranks):
                self._start(rank)
        except OSError as error:
            self.__exit__()
            failed = len(self.processes)
            raise ControlError(f"rank {failed} could not be started: {error}") from error
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._selector.close()

    def wait(self) -> None:
        """Watch until every rank has ended.

        Raises:
            RankLost: a rank was killed or stopped.
            ControlError: a rank did not come up, or failed by itself; names it, and quotes the
                error that it reported.
        """
        expiry: float | None = None
        while self._alive():
            self._listen()
            self._look()
            self._check_beats()
            if expiry is None and (self._faults or self._killed):
                expiry = time.monotonic() + GRACE * self._task.settings.deadline
            if expiry is not None and (time.monotonic() > expiry or self._only_lost_remain()):
                break
        self._look()
        if self._faults or self._killed:
            raise self._verdict()

    def _start(self, rank: int) -> None:
        host, port = self._host.address
        process = subprocess.Popen(
            # -P: a file in the user's folder must not be taken for a module of ours.
            [sys.executable, "-P", "-m", "equipoise.demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(self._task.settings.ranks),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                AGENT_STORE: "True",
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                # The store looks names up with every connection; a silent name server costs 5 s.
                "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
            },
        )
        self.processes.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._task.to_json() + "\n")
        process.stdin.flush()
        self._selector.register(process.stdout, selectors.EVENT_READ, rank)

    def _alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def _listen(self) -> None:
        """Take what the ranks say, for at most `POLL` seconds."""
        for key, _ in self._selector.select(POLL):
            pipe: IO[str] = key.fileobj  # type: ignore[assignment]
            line = pipe.readline()
            if line:
                self._hear(key.data, line)
            else:
                self._selector.unregister(pipe)

    def _drain(self, rank: int) -> None:
        """Take everything that a rank which has ended still had to say."""
        pipe = self.processes[rank].stdout
        assert pipe is not None
        for line in pipe:
            self._hear(rank, line)

    def _hear(self, rank: int, line: str) -> None:
        try:
            message: Any = json.loads(line)
        except ValueError:
            sys.stderr.write(line)
            return
        match message:
            case {"variant": name, "steps": steps}:
                self._progress.variant(name, steps)
            case {"done": steps_done, "imbalance": imbalance, "note": note}:
                self._progress.step(steps_done, imbalance, note)
            case {"live": str()}:
                self._progress.live(message)
            case {"lost": _, "how": _, "operation": _} | {"failed": _}:
                self._faults[rank] = message
            case _:
                sys.stderr.write(line)

    def _look(self) -> None:
        """Notice ranks that a signal killed, and report the first to the others."""
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code is None:
                continue
            self._drain(rank)
            if rank in self._killed or rank in self._faults:
                continue
            if code < 0:
                self._killed[rank] = f"was killed by {signal.Signals(-code).name}"
                self._host.report_loss(rank, self._killed[rank])
            elif code > 0:
                self._faults[rank] = {"failed": f"ended with exit code {code}"}

    def _check_beats(self) -> None:
        """Give up a rank without heartbeat, in case no other rank is left to notice.

        Beats are read before they are judged: a launcher that was itself stopped accuses no rank.
        """
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK
        deadline = self._task.settings.deadline
        for rank in self._alive():
            count, operation = self._host.beat(rank)
            if count != self._beats[rank][0]:
                self._beats[rank] = (count, now)
            silence = now - self._beats[rank][1]
            if not count and silence > max(START, deadline):
                raise ControlError(
                    f"rank {rank} gave no sign of life in the {silence:.0f} s since its start: on "
                    f"a busy machine raise --deadline above that (now {deadline:g} s)"
                )
            if count and silence > MAX_SILENCE * deadline:
                how = f"fell silent {silence:.0f} s ago"
                self._host.report_loss(rank, how)
                raise RankLost(rank, how, operation)

    def _only_lost_remain(self) -> bool:
        """Whether all that still runs is what the others have given up (a stopped rank)."""
        lost_ranks = {fault["lost"] for fault in self._faults.values() if "lost" in fault}
        return set(self._alive()) <= lost_ranks

    def _verdict(self) -> EquipoiseError:
        """The one line that explains the end of the run."""
        accusations = [fault for fault in self._faults.values() if "lost" in fault]
        for rank, how in self._killed.items():
            last = self._host.beat(rank)[1]
            return RankLost(rank, how, accusations[0]["operation"] if accusations else last)
        own = {rank: f["failed"] for rank, f in self._faults.items() if "failed" in f}
        for rank, reason in own.items():
            return ControlError(f"rank {rank} failed: {reason}")
        first = accusations[0]
        return RankLost(first["lost"], first["how"], first["operation"])


def run_demo(settings: RunSettings, progress: RunProgress) -> RunRecord | None:
    """Serve the traffic on `settings.ranks` processes of this machine.

    Under `torchrun` or mpiexec the processes exist already: this one serves as the rank it is, and
    every rank but 0 gets None.

    Raises:
        BackendUnavailable: the backend, or its communicator, cannot run here.
        RankLost: a rank was killed or stopped; names rank and operation.
        InvalidText: a text file cannot be served.
        EquipoiseError: anything else that ends the run.
    """
    settings = with_communicator(settings)
    if is_launched():
        return serve_rank(settings, rendezvous_from(os.environ, settings.deadline), progress)
    load_phases(settings.text)
    with temporary_folder() as folder:
        task = RankTask(settings, folder / "record.npz", os.getpid())
        _run_ranks(task, progress)
        return load_record(task.record)


def record_demo(settings: RunSettings, recording: RecordingSettings, progress: RunProgress) -> None:
    """Serve the traffic once, and have every rank write what its tokens asked of each expert.

    Under `torchrun` or mpiexec this process is one of the ranks, and writes into the folder of its
    machine.

    Raises:
        as `run_demo`; FormatError where a file cannot be written.
    """
    settings = with_communicator(settings)
    if is_launched():
        where = rendezvous_from(os.environ, settings.deadline)
        record_rank(settings, recording, where, progress)
        return
    load_phases(settings.text)
    _run_ranks(RankTask(settings, Path(os.devnull), os.getpid(), recording), progress)


def _run_ranks(task: RankTask, progress: RunProgress) -> None:
    """Start them all, and wait until they have ended; raises what ended them."""
    host = registry.communicator(task.settings.communicator).host()
    try:
        with RankProcesses(task, host, progress) as ranks:
            ranks.wait()
    finally:
        host.close()


def with_communicator(settings: RunSettings) -> RunSettings:
    """The settings with a communicator's name in them; raises `BackendUnavailable`."""
    backend = available(settings.backend)
    return replace(settings, communicator=settings.communicator or backend.communicator)
