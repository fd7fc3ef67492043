"""Daemon threads inside of C++ calls while the interpreter ends."""

import subprocess
import sys
import threading

import pytest

from equipoise.hal.abroad import Abroad

RANK = """
import datetime, threading, time, torch.distributed as dist
from equipoise.hal.abroad import ABROAD
store = dist.TCPStore("127.0.0.1", 0, 1, True)
def wait():
    while True:
        with {context}:
            try:
                store.wait(["never"], datetime.timedelta(milliseconds=5))
            except dist.DistError:
                pass
for _ in range(4):
    threading.Thread(target=wait, daemon=True).start()
time.sleep(0.05)
"""
"""Threads that come back from C++ every few milliseconds, also while the interpreter ends."""


def ended(context: str) -> int:
    program = RANK.format(context=context)
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=240)
    return process.returncode


def test_a_process_ends_well_while_its_threads_are_in_calls() -> None:
    assert [ended("ABROAD") for _ in range(3)] == [0, 0, 0]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="threads are no longer unwound")
def test_such_a_process_may_die_without_it() -> None:
    context = "__import__('contextlib').nullcontext()"
    assert any(ended(context) for _ in range(3))


def test_the_end_waits_for_who_is_abroad_and_lets_nobody_in() -> None:
    abroad, gone, back = Abroad(), threading.Event(), threading.Event()

    def travel() -> None:
        with abroad:
            gone.set()
            back.wait(10)

    thread = threading.Thread(target=travel)
    thread.start()
    assert gone.wait(10)
    assert not abroad.close(0.01)
    with pytest.raises(SystemExit), abroad:
        pass
    back.set()
    assert abroad.close(10)
    thread.join(10)


def test_the_end_does_not_wait_for_ever() -> None:
    abroad = Abroad()
    with abroad:
        assert not abroad.close(0.0)
