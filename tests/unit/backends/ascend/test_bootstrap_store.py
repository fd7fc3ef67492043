"""How the ranks of one of HCCL's communicators learn where to meet."""

import threading
import time

import pytest

from equipoise.backends.ascend.hccl import BootstrapStore
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


@pytest.mark.parametrize("keys", [["0"], ["0", "version_key"]], ids=["2.10", "2.13"])
def test_bootstrap_store_passes_values_from_first_rank(planes: Planes, keys: list[str]) -> None:
    """As the versions of torch_npu set keys; the first rank goes on when the other has them all."""
    writer_store, reader_store = (make_store(plane) for plane in planes)
    values: list[bytes] = []
    reader = threading.Thread(target=lambda: values.extend(map(reader_store.get, keys)))
    reader.start()
    for key in keys:
        writer_store.set(key, b"\0" + key.encode() + b"\xff")
    reader.join(DEADLINE)
    assert values == [b"\0" + key.encode() + b"\xff" for key in keys]


@pytest.mark.parametrize("key", ["0", "version_key"])
def test_bootstrap_store_set_times_out_without_reader(planes: Planes, key: str) -> None:
    with pytest.raises(BallotIncomplete) as error:
        make_store(planes[0], SHORT).set(key, b"2.13")
    assert error.value.missing == (1,)


def test_bootstrap_store_get_fails_after_detach(planes: Planes) -> None:
    store = make_store(planes[0])
    store.detach()
    with pytest.raises(CommunicatorFailed, match="after the introduction"):
        store.get("0")
