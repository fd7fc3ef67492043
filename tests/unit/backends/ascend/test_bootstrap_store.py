"""How the ranks of one of HCCL's communicators learn where to meet."""

import threading
import time

import pytest

from equipoise.backends.ascend.hccl import LAST_KEY, BootstrapStore
from equipoise.backends.common.bounded_wait import Deadline
from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.backends.devices.collectives.bootstrap import Bootstrap
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed

DEADLINE = 20.0
SHORT = 0.05
Planes = list[StoreControlPlane]


def make_store(plane: StoreControlPlane, seconds: float = DEADLINE) -> BootstrapStore:
    deadline = Deadline(time.monotonic() + seconds, threading.Event())
    return BootstrapStore(Bootstrap(plane, "q", (0, 1), deadline))


def test_bootstrap_store_passes_value_from_first_rank(planes: Planes) -> None:
    writer_store, reader_store = (make_store(plane) for plane in planes)
    writer_store.set("0", b"\0where\xff")
    assert reader_store.get("0") == b"\0where\xff"


def test_bootstrap_store_last_set_waits_until_peers_read_it(planes: Planes) -> None:
    writer_store, reader_store = (make_store(plane) for plane in planes)
    values: list[bytes] = []
    listening = threading.Thread(target=lambda: values.append(reader_store.get(LAST_KEY)))
    listening.start()
    writer_store.set(LAST_KEY, b"2.13")
    listening.join(DEADLINE)
    assert values == [b"2.13"]


def test_bootstrap_store_last_set_times_out_without_peer(planes: Planes) -> None:
    with pytest.raises(BallotIncomplete) as error:
        make_store(planes[0], SHORT).set(LAST_KEY, b"2.13")
    assert error.value.missing == (1,)


def test_bootstrap_store_get_fails_after_detach(planes: Planes) -> None:
    store = make_store(planes[0])
    store.detach()
    with pytest.raises(CommunicatorFailed, match="after the introduction"):
        store.get("0")
