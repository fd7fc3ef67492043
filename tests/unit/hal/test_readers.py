"""Attached streams, from events alone: clauses A12 and V4."""

import threading
from collections.abc import Iterator

import pytest

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.hal.errors import StreamFailed, StreamTimeout
from equipoise.hal.readers import Readers
from equipoise.hal.stream import Role, Stream

SOON = 20.0


@pytest.fixture
def cpu() -> Iterator[CpuAccelerator]:
    made = BACKEND.open(0)
    yield made
    made.close()


def commit(cpu: CpuAccelerator, readers: Readers, writer: Stream, log: list[str]) -> None:
    held = readers.hold(writer)
    writer.launch(lambda: log.append("commit"))
    done = cpu.event()
    writer.record(done)
    readers.follow(held, done)


def test_a_commit_comes_between_two_launches_of_a_reader(cpu: CpuAccelerator) -> None:
    readers, log, gate = Readers(cpu.event), list[str](), threading.Event()
    reader, writer = cpu.stream(Role.COMPUTE), cpu.stream(Role.COPY)
    readers.attach(reader)
    reader.launch(lambda: gate.wait(SOON))
    reader.launch(lambda: log.append("before"))
    commit(cpu, readers, writer, log)
    reader.launch(lambda: log.append("after"))
    with pytest.raises(StreamTimeout):
        writer.synchronize(0.02)
    gate.set()
    cpu.synchronize(SOON)
    assert log == ["before", "commit", "after"]


def test_a_stream_with_two_readers_is_held_until_both_are_detached(cpu: CpuAccelerator) -> None:
    readers, reader, writer = Readers(cpu.event), cpu.stream(Role.COMPUTE), cpu.stream(Role.COPY)
    first, second = readers.attach(reader), readers.attach(reader)
    assert readers.hold(writer) == (reader,)
    first.detach()
    first.detach()
    assert readers.hold(writer) == (reader,)
    second.detach()
    assert readers.hold(writer) == ()


def test_the_writers_own_stream_is_not_held(cpu: CpuAccelerator) -> None:
    readers, stream = Readers(cpu.event), cpu.stream(Role.COMPUTE)
    readers.attach(stream)
    assert readers.hold(stream) == ()


def test_a_failed_reader_is_not_waited_for_attached_or_detached(cpu: CpuAccelerator) -> None:
    readers, log = Readers(cpu.event), list[str]()
    reader, writer = cpu.stream(Role.COMPUTE), cpu.stream(Role.COPY)
    attached = readers.attach(reader)
    reader.launch(lambda: 1 / 0)
    with pytest.raises(StreamFailed):
        reader.synchronize(SOON)
    commit(cpu, readers, writer, log)
    attached.detach()
    commit(cpu, readers, writer, log)
    writer.synchronize(SOON)
    assert log == ["commit", "commit"]


def test_every_writer_waits_for_a_detached_reader_and_then_it_is_forgotten(
    cpu: CpuAccelerator,
) -> None:
    readers, gate = Readers(cpu.event), threading.Event()
    reader, writers = cpu.stream(Role.COMPUTE), [cpu.stream(Role.COPY), cpu.stream(Role.AUX)]
    attached = readers.attach(reader)
    reader.launch(lambda: gate.wait(SOON))
    attached.detach()
    for writer in writers:
        commit(cpu, readers, writer, [])
        with pytest.raises(StreamTimeout):
            writer.synchronize(0.02)
    gate.set()
    cpu.synchronize(SOON)
    for _ in range(3):
        readers.attach(reader).detach()
    reader.synchronize(SOON)
    readers.hold(writers[0])
    assert readers._left == {}
