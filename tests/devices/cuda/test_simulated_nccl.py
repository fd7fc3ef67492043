"""The stand-in for NCCL does as NCCL where a communicator is given up before it was made."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from cudasim.nccl_library import SimulatedNccl
from helpers.harnesses.devices import backend

from equipoise.backends.cuda.nccl_api import NcclApi

ELSEWHERE = """
import sys
from cudasim.nccl_library import SimulatedNccl
from equipoise.backends.cuda.nccl_api import NcclApi
print(NcclApi(SimulatedNccl(int)).unique_id().hex(), flush=True)
sys.stdin.read()
"""
"""A first member that says where to meet, and never joins."""


@pytest.fixture
def api() -> Iterator[NcclApi]:
    with closing(backend("ascend").open(0)):
        yield NcclApi(SimulatedNccl(int))


def joining() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cudasim.nccl"]


def give_up(api: NcclApi, where: bytes, rank: int) -> list[threading.Thread]:
    """Join as one of two, and abort while the other one has not come: threads that are left.

    No bound of time ends such a join sooner than HCCL_CONNECT_TIMEOUT, two minutes.
    """
    comm = api.join(where, 2, rank, 8)
    assert api.in_progress(comm)
    api.abort(comm)
    return joining()


def test_abort_ends_join_that_waits_for_other_rank(api: NcclApi) -> None:
    assert give_up(api, api.unique_id(), 0) == []


def test_abort_ends_join_that_waits_for_first_rank(api: NcclApi) -> None:
    command = [sys.executable, "-c", ELSEWHERE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        where = bytes.fromhex(first.stdout.readline())
        assert give_up(api, where, 1) == []
        first.stdin.close()
