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
OTHER_TOKEN = bytes(range(1, 17))


def create_pool_memory(token: bytes = TOKEN, layout: PoolLayout = LAYOUT) -> int:
    descriptor = shared_memory.create(layout.nbytes)
    PoolHeader.of(layout, token).write(descriptor)
    return descriptor


@pytest.fixture
def descriptor() -> Iterator[int]:
    pool_fd = create_pool_memory()
    yield pool_fd
    os.close(pool_fd)


def test_offer_opens_same_memory_after_encoding(descriptor: int) -> None:
    handle = MemoryHandle.decode(MemoryHandle.of(descriptor, TOKEN).encode())
    opened_fd = handle.open(LAYOUT)
    assert opened_fd != descriptor
    assert os.fstat(opened_fd).st_ino == os.fstat(descriptor).st_ino
    assert not os.get_inheritable(opened_fd)
    os.pwrite(opened_fd, b"here", LAYOUT.experts_offset)
    assert os.pread(descriptor, 4, LAYOUT.experts_offset) == b"here"
    os.close(opened_fd)


HANDLE_CHANGES: dict[str, tuple[dict[str, object], str]] = {
    "machine": ({"boot_id": "another"}, "on another machine"),
    "number used again": ({"start_time": 1}, "is another one here"),
    "no process": ({"process": 1 << 30}, "cannot open it"),
    "no descriptor": ({"descriptor": 99999}, "cannot open it"),
    "instance": ({"token": OTHER_TOKEN.hex()}, "header is of another pool"),
}


@pytest.mark.parametrize(("handle_changes", "message"), HANDLE_CHANGES.values(), ids=HANDLE_CHANGES)
def test_offer_of_another_process_or_machine_is_refused(
    descriptor: int, handle_changes: dict[str, object], message: str
) -> None:
    before = holdings()
    with pytest.raises(PoolMismatch, match=message):
        dataclasses.replace(MemoryHandle.of(descriptor, TOKEN), **handle_changes).open(LAYOUT)  # type: ignore[arg-type]
    assert holdings() == before


def file_of(path: Path) -> int:
    path.write_bytes(bytes(LAYOUT.nbytes))
    return os.open(path, os.O_RDWR)


def create_unsealed_memory() -> int:
    descriptor = os.memfd_create(shared_memory.MEMORY_NAME, os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, LAYOUT.nbytes)
    PoolHeader.of(LAYOUT, TOKEN).write(descriptor)
    return descriptor


def create_sealed_memory() -> int:
    descriptor = create_pool_memory()
    shared_memory.seal(descriptor)
    return descriptor


WRONG_MEMORY: dict[str, tuple[Callable[[Path], int], str]] = {
    "file": (lambda path: file_of(path / "file"), "is something else"),
    "socket": (lambda path: socket.socket().detach(), "is something else"),
    "pipe": (lambda path: os.pipe()[0], "is something else"),
    "unsealed": (lambda path: create_unsealed_memory(), "its seals are"),
    "sealed": (lambda path: create_sealed_memory(), "its seals are"),
    "size": (
        lambda path: create_pool_memory(layout=PoolLayout(LAYOUT.descriptor, 9, 9)),
        "bytes instead of",
    ),
    "layout": (
        lambda path: create_pool_memory(layout=PoolLayout(LAYOUT.descriptor, 5, 3)),
        "header is of another pool",
    ),
    "empty": (lambda path: shared_memory.create(LAYOUT.nbytes), "header is of another pool"),
}


@pytest.mark.parametrize(("make", "message"), WRONG_MEMORY.values(), ids=WRONG_MEMORY)
def test_offer_of_wrong_memory_is_refused_and_closed(
    make: Callable[[Path], int], message: str, tmp_path: Path
) -> None:
    descriptor = make(tmp_path)
    before = holdings()
    with pytest.raises(PoolMismatch, match=message):
        MemoryHandle.of(descriptor, TOKEN).open(LAYOUT)
    with (
        FdServer(descriptor, TOKEN) as server,
        pytest.raises(PoolMismatch, match=message if "something" not in message else "it has"),
    ):
        receive_fd(server.address, MemoryHandle.of(descriptor, TOKEN), LAYOUT)
    assert holdings() == before
    os.close(descriptor)


def test_offer_is_refused_when_proc_shows_another_process(descriptor: int, tmp_path: Path) -> None:
    handle = MemoryHandle.of(descriptor, TOKEN)
    with pytest.raises(PoolMismatch, match="cannot open it"):
        handle.open(LAYOUT, tmp_path)
    (tmp_path / f"{os.getpid()}").mkdir()
    (tmp_path / f"{os.getpid()}" / "stat").write_text("7 (name) S 1")
    with pytest.raises(PoolMismatch, match="no start time"):
        handle.open(LAYOUT, tmp_path)


@pytest.mark.parametrize("name", ["plain", "a) b", "(", ")) S 1 2"])
def test_process_start_time_is_parsed_for_any_process_name(name: str, tmp_path: Path) -> None:
    fields = " ".join(str(number) for number in range(3, 53))
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 ({name}) {fields}\n")
    assert rendezvous.start_time(7, tmp_path) == 22


def test_memory_socket_sends_fd_for_valid_token(descriptor: int) -> None:
    handle = MemoryHandle.of(descriptor, TOKEN)
    with FdServer(descriptor, TOKEN) as server:
        received_fds = [receive_fd(server.address, handle, LAYOUT) for _ in range(3)]
    assert {os.fstat(each).st_ino for each in received_fds} == {os.fstat(descriptor).st_ino}
    for each in received_fds:
        assert not os.get_inheritable(each)
        os.close(each)


def test_memory_socket_refuses_wrong_token_and_serves_next_client(
    descriptor: int,
) -> None:
    handle = MemoryHandle.of(descriptor, TOKEN)
    with FdServer(descriptor, TOKEN) as server:
        with pytest.raises(
            PoolMismatch, match="closed the connection without sending a descriptor"
        ):
            receive_fd(server.address, dataclasses.replace(handle, token=OTHER_TOKEN.hex()), LAYOUT)
        with socket.socket(socket.AF_UNIX) as silent_client:
            silent_client.connect(f"\0{server.address}")
        os.close(receive_fd(server.address, handle, LAYOUT))


def test_memory_socket_is_unreachable_after_close(descriptor: int) -> None:
    with FdServer(descriptor, TOKEN) as server:
        address = server.address
    with pytest.raises(PoolMismatch, match="cannot connect to the descriptor server"):
        receive_fd(address, MemoryHandle.of(descriptor, TOKEN), LAYOUT)


def test_memory_socket_refuses_another_user(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = MemoryHandle.of(descriptor, TOKEN)
    with FdServer(descriptor, TOKEN) as server:
        monkeypatch.setattr(
            "equipoise.balancer.experts.host_pool.rendezvous.same_user", lambda peer: False
        )
        with pytest.raises(PoolMismatch, match="another user"):
            receive_fd(server.address, handle, LAYOUT)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"\0{server.address}")
            client.sendall(TOKEN)
            assert socket.recv_fds(client, 1, 1)[1] == []
