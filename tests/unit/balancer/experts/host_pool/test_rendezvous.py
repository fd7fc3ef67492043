"""Who opens what a peer offers gets that very memory, or a reason."""

import dataclasses
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.harnesses.host_pool import LAYOUT, holdings

from equipoise.balancer.experts.host_pool import rendezvous, shared_memory
from equipoise.balancer.experts.host_pool.layout import PoolLayout
from equipoise.balancer.experts.host_pool.rendezvous import FdServer, MemoryHandle, receive_fd
from equipoise.balancer.experts.host_pool.shared_memory import PoolHeader
from equipoise.hal.errors import PoolMismatch

TOKEN = bytes(range(16))
OTHER = bytes(range(1, 17))


def made(token: bytes = TOKEN, layout: PoolLayout = LAYOUT) -> int:
    descriptor = shared_memory.create(layout.nbytes)
    PoolHeader.of(layout, token).write(descriptor)
    return descriptor


@pytest.fixture
def descriptor() -> Iterator[int]:
    found = made()
    yield found
    os.close(found)


def test_offer_opens_same_memory_after_encoding(descriptor: int) -> None:
    sent = MemoryHandle.decode(MemoryHandle.of(descriptor, TOKEN).encode())
    found = sent.open(LAYOUT)
    assert found != descriptor
    assert os.fstat(found).st_ino == os.fstat(descriptor).st_ino
    assert not os.get_inheritable(found)
    os.pwrite(found, b"here", LAYOUT.experts_offset)
    assert os.pread(descriptor, 4, LAYOUT.experts_offset) == b"here"
    os.close(found)


CHANGED: dict[str, tuple[dict[str, object], str]] = {
    "machine": ({"boot_id": "another"}, "on another machine"),
    "number used again": ({"start_time": 1}, "is another one here"),
    "no process": ({"process": 1 << 30}, "cannot open it"),
    "no descriptor": ({"descriptor": 99999}, "cannot open it"),
    "instance": ({"token": OTHER.hex()}, "header is of another pool"),
}


@pytest.mark.parametrize(("changed", "message"), CHANGED.values(), ids=CHANGED)
def test_offer_of_another_process_or_machine_is_refused(
    descriptor: int, changed: dict[str, object], message: str
) -> None:
    before = holdings()
    with pytest.raises(PoolMismatch, match=message):
        dataclasses.replace(MemoryHandle.of(descriptor, TOKEN), **changed).open(LAYOUT)  # type: ignore[arg-type]
    assert holdings() == before


def file_of(path: Path) -> int:
    path.write_bytes(bytes(LAYOUT.nbytes))
    return os.open(path, os.O_RDWR)


def unsealed() -> int:
    descriptor = os.memfd_create(shared_memory.MEMORY_NAME, os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, LAYOUT.nbytes)
    PoolHeader.of(LAYOUT, TOKEN).write(descriptor)
    return descriptor


def sealed() -> int:
    descriptor = made()
    shared_memory.seal(descriptor)
    return descriptor


WRONG: dict[str, tuple[Callable[[Path], int], str]] = {
    "file": (lambda path: file_of(path / "file"), "is something else"),
    "socket": (lambda path: socket.socket().detach(), "is something else"),
    "pipe": (lambda path: os.pipe()[0], "is something else"),
    "unsealed": (lambda path: unsealed(), "its seals are"),
    "sealed": (lambda path: sealed(), "its seals are"),
    "size": (lambda path: made(layout=PoolLayout(LAYOUT.descriptor, 9, 9)), "bytes instead of"),
    "layout": (
        lambda path: made(layout=PoolLayout(LAYOUT.descriptor, 5, 3)),
        "header is of another pool",
    ),
    "empty": (lambda path: shared_memory.create(LAYOUT.nbytes), "header is of another pool"),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_offer_of_wrong_memory_is_refused_and_closed(
    make: Callable[[Path], int], message: str, tmp_path: Path
) -> None:
    descriptor = make(tmp_path)
    before = holdings()
    with pytest.raises(PoolMismatch, match=message):
        MemoryHandle.of(descriptor, TOKEN).open(LAYOUT)
    with (
        FdServer(descriptor, TOKEN) as door,
        pytest.raises(PoolMismatch, match=message if "something" not in message else "it has"),
    ):
        receive_fd(door.address, MemoryHandle.of(descriptor, TOKEN), LAYOUT)
    assert holdings() == before
    os.close(descriptor)


def test_offer_is_refused_when_proc_shows_another_process(descriptor: int, tmp_path: Path) -> None:
    told = MemoryHandle.of(descriptor, TOKEN)
    with pytest.raises(PoolMismatch, match="cannot open it"):
        told.open(LAYOUT, tmp_path)
    (tmp_path / f"{os.getpid()}").mkdir()
    (tmp_path / f"{os.getpid()}" / "stat").write_text("7 (name) S 1")
    with pytest.raises(PoolMismatch, match="no start time"):
        told.open(LAYOUT, tmp_path)


@pytest.mark.parametrize("name", ["plain", "a) b", "(", ")) S 1 2"])
def test_process_start_time_is_parsed_for_any_process_name(name: str, tmp_path: Path) -> None:
    fields = " ".join(str(number) for number in range(3, 53))
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 ({name}) {fields}\n")
    assert rendezvous.start_time(7, tmp_path) == 22


def test_memory_socket_sends_fd_for_valid_token(descriptor: int) -> None:
    told = MemoryHandle.of(descriptor, TOKEN)
    with FdServer(descriptor, TOKEN) as door:
        found = [receive_fd(door.address, told, LAYOUT) for _ in range(3)]
    assert {os.fstat(each).st_ino for each in found} == {os.fstat(descriptor).st_ino}
    for each in found:
        assert not os.get_inheritable(each)
        os.close(each)


def test_memory_socket_refuses_wrong_token_and_serves_next_client(
    descriptor: int,
) -> None:
    told = MemoryHandle.of(descriptor, TOKEN)
    with FdServer(descriptor, TOKEN) as door:
        with pytest.raises(PoolMismatch, match="its door was shut"):
            receive_fd(door.address, dataclasses.replace(told, token=OTHER.hex()), LAYOUT)
        with socket.socket(socket.AF_UNIX) as rude:
            rude.connect(f"\0{door.address}")
        os.close(receive_fd(door.address, told, LAYOUT))


def test_memory_socket_is_unreachable_after_close(descriptor: int) -> None:
    with FdServer(descriptor, TOKEN) as door:
        address = door.address
    with pytest.raises(PoolMismatch, match="no way to its door"):
        receive_fd(address, MemoryHandle.of(descriptor, TOKEN), LAYOUT)


def test_memory_socket_refuses_another_user(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = MemoryHandle.of(descriptor, TOKEN)
    with FdServer(descriptor, TOKEN) as door:
        monkeypatch.setattr(
            "equipoise.balancer.experts.host_pool.rendezvous.same_user", lambda peer: False
        )
        with pytest.raises(PoolMismatch, match="another user"):
            receive_fd(door.address, told, LAYOUT)
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(f"\0{door.address}")
            visitor.sendall(TOKEN)
            assert socket.recv_fds(visitor, 1, 1)[1] == []
