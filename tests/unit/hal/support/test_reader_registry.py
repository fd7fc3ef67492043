"""Attached streams, from events alone: clauses A12 and V4."""

import threading
from collections.abc import Iterator

import pytest
from helpers.watchdog import WATCHDOG

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.hal.errors import StreamFailed, StreamTimeout
from equipoise.hal.stream import Role, Stream
from equipoise.hal.support.slot_access import ReaderRegistry


@pytest.fixture
def cpu() -> Iterator[CpuAccelerator]:
    accelerator = BACKEND.open(0)
    yield accelerator
    accelerator.close()


def commit(cpu: CpuAccelerator, readers: ReaderRegistry, writer: Stream, log: list[str]) -> None:
    paused_readers = readers.wait_for_readers(writer)
    writer.launch(lambda: log.append("commit"))
    commit_event = cpu.event()
    writer.record(commit_event)
    readers.resume_readers(paused_readers, commit_event)


def test_commit_runs_between_two_reader_launches(cpu: CpuAccelerator) -> None:
    readers, log, gate = ReaderRegistry(cpu.event), list[str](), threading.Event()
    reader, writer = cpu.stream(Role.COMPUTE), cpu.stream(Role.COPY)
    readers.attach(reader)
    reader.launch(lambda: gate.wait(WATCHDOG))
    reader.launch(lambda: log.append("before"))
    commit(cpu, readers, writer, log)
    reader.launch(lambda: log.append("after"))
    with pytest.raises(StreamTimeout):
        writer.synchronize(0.02)
    gate.set()
    cpu.synchronize(WATCHDOG)
    assert log == ["before", "commit", "after"]


def test_stream_is_held_until_all_its_readers_detach(cpu: CpuAccelerator) -> None:
    readers, reader, writer = (
        ReaderRegistry(cpu.event),
        cpu.stream(Role.COMPUTE),
        cpu.stream(Role.COPY),
    )
    first, second = readers.attach(reader), readers.attach(reader)
    assert readers.wait_for_readers(writer) == (reader,)
    first.detach()
    first.detach()
    assert readers.wait_for_readers(writer) == (reader,)
    second.detach()
    assert readers.wait_for_readers(writer) == ()


def test_readers_do_not_hold_writer_stream(cpu: CpuAccelerator) -> None:
    readers, stream = ReaderRegistry(cpu.event), cpu.stream(Role.COMPUTE)
    readers.attach(stream)
    assert readers.wait_for_readers(stream) == ()


def test_readers_skip_failed_stream(cpu: CpuAccelerator) -> None:
    readers, log = ReaderRegistry(cpu.event), list[str]()
    reader, writer = cpu.stream(Role.COMPUTE), cpu.stream(Role.COPY)
    attachment = readers.attach(reader)
    reader.launch(lambda: 1 / 0)
    with pytest.raises(StreamFailed):
        reader.synchronize(WATCHDOG)
    commit(cpu, readers, writer, log)
    attachment.detach()
    commit(cpu, readers, writer, log)
    writer.synchronize(WATCHDOG)
    assert log == ["commit", "commit"]


def test_writers_wait_for_detached_reader_then_forget_it(
    cpu: CpuAccelerator,
) -> None:
    readers, gate = ReaderRegistry(cpu.event), threading.Event()
    reader, writers = cpu.stream(Role.COMPUTE), [cpu.stream(Role.COPY), cpu.stream(Role.AUX)]
    attachment = readers.attach(reader)
    reader.launch(lambda: gate.wait(WATCHDOG))
    attachment.detach()
    for writer in writers:
        commit(cpu, readers, writer, [])
        with pytest.raises(StreamTimeout):
            writer.synchronize(0.02)
    gate.set()
    cpu.synchronize(WATCHDOG)
    for _ in range(3):
        readers.attach(reader).detach()
    reader.synchronize(WATCHDOG)
    readers.wait_for_readers(writers[0])
    assert readers._detached_events == {}
