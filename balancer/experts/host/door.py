"""A socket that hands a descriptor to ranks of the same user which may not look into /proc."""

import os
import secrets
import socket
import struct
import threading
import time
from typing import Self

from equipoise.balancer.experts.host.header import TOKEN
from equipoise.balancer.experts.host.layout import PoolLayout
from equipoise.balancer.experts.host.offer import Offer
from equipoise.hal.errors import ExpertPoolError, ForeignMemory

SLICE = 0.05
"""Seconds between two looks at whether to go on."""
PATIENCE = 5.0
"""Seconds that one visitor may take."""
ENDING = 2 * PATIENCE + SLICE
"""Seconds that closing may take: a visitor may connect at the last moment, and be slow."""
NUMBER = struct.Struct("i")
CREDENTIALS = struct.Struct("3i")


class Door:
    """Listens while it is open, at an address in no file system that ends with the process.

    Gives the descriptor to whoever is of the same user and says the token of the instance; sends
    everybody else away, and goes on.
    """

    def __init__(self, descriptor: int, token: bytes) -> None:
        self._descriptor = descriptor
        self._token = token
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self.address = f"equipoise-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen()
        self._socket.settimeout(SLICE)
        self._thread = threading.Thread(target=self._serve, name=self.address, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Shut it. Raises `ExpertPoolError` if it failed meanwhile."""
        self._closing.set()
        self._thread.join(ENDING)
        self._socket.close()
        if self._thread.is_alive():
            raise ExpertPoolError(f"the pool's door does not shut within {ENDING:g} s")
        if self._failure is not None:
            raise ExpertPoolError(f"the pool's door failed: {self._failure}") from self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    visitor, _ = self._socket.accept()
                except TimeoutError:
                    continue
                with visitor:
                    self._receive(visitor)
        except BaseException as error:
            self._failure = error

    def _receive(self, visitor: socket.socket) -> None:
        """A visitor that breaks off, or says something else, is its own business."""
        try:
            visitor.settimeout(PATIENCE)
            said = _read(visitor, TOKEN)
            if same_user(visitor) and secrets.compare_digest(said, self._token):
                socket.send_fds(visitor, [b"!"], [self._descriptor])
        except OSError:
            return


def knock(address: str, offer: Offer, layout: PoolLayout) -> int:
    """The descriptor behind the door at `address`, checked. Raises `ForeignMemory`."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as door:
            door.settimeout(PATIENCE)
            door.connect(f"\0{address}")
            if not same_user(door):
                raise ForeignMemory("another user opened the door")
            door.sendall(bytes.fromhex(offer.token))
            # Not by `recv_fds`, which in Python 3.11 drops the flag and lets children inherit it.
            space = socket.CMSG_LEN(NUMBER.size)
            _, extra, _, _ = door.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise ForeignMemory(f"no way to its door: {error}") from error
    if not extra:
        raise ForeignMemory("its door was shut")
    return offer.checked(NUMBER.unpack(extra[0][2])[0], layout)


def same_user(peer: socket.socket) -> bool:
    """Whether the kernel says that the other end runs as this user."""
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(packed)
    return bool(user == os.geteuid())


def _read(peer: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or fewer if no more come."""
    said, expiry = b"", time.monotonic() + PATIENCE
    while len(said) < nbytes and time.monotonic() < expiry:
        part = peer.recv(nbytes - len(said))
        if not part:
            break
        said += part
    return said
