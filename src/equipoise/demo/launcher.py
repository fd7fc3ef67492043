"""Starts the ranks of a run, watches them, and ends every one of them whatever happens."""

import os
from dataclasses import replace
from pathlib import Path

from equipoise.connection import available, is_launched, rendezvous_from
from equipoise.demo.progress import Progress
from equipoise.demo.rank import record_rank, serve_rank
from equipoise.demo.ranks import Ranks
from equipoise.demo.record import RunRecord
from equipoise.demo.record_file import load_record
from equipoise.demo.settings import Recording, RunSettings
from equipoise.demo.temporary_folder import temporary_folder
from equipoise.demo.traffic import load_phases
from equipoise.demo.worker import Task
from equipoise.hal import registry


def run_demo(settings: RunSettings, progress: Progress) -> RunRecord | None:
    """Serve the traffic on `settings.ranks` processes of this machine.

    Under `torchrun` or mpiexec the processes exist already: this one serves as the rank it is, and
    every rank but 0 gets None.

    Raises:
        BackendUnavailable: the backend, or its communicator, cannot run here.
        RankLost: a rank was killed or stopped; names rank and operation.
        BadText: a text file cannot be served.
        EquipoiseError: anything else that ends the run.
    """
    settings = with_communicator(settings)
    if is_launched():
        return serve_rank(settings, rendezvous_from(os.environ, settings.deadline), progress)
    load_phases(settings.text)
    with temporary_folder() as folder:
        task = Task(settings, folder / "record.npz", os.getpid())
        _run_ranks(task, progress)
        return load_record(task.record)


def record_demo(settings: RunSettings, recording: Recording, progress: Progress) -> None:
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
    _run_ranks(Task(settings, Path(os.devnull), os.getpid(), recording), progress)


def _run_ranks(task: Task, progress: Progress) -> None:
    """Start them all, and wait until they have ended; raises what ended them."""
    host = registry.communicator(task.settings.communicator).host()
    try:
        with Ranks(task, host, progress) as ranks:
            ranks.wait()
    finally:
        host.close()


def with_communicator(settings: RunSettings) -> RunSettings:
    """The settings with a communicator's name in them; raises `BackendUnavailable`."""
    backend = available(settings.backend)
    return replace(settings, communicator=settings.communicator or backend.communicator)
