"""Daemon threads inside C++ calls while the interpreter shuts down."""

import subprocess
import sys
import threading

import pytest
from helpers.watchdog import WATCHDOG

from equipoise.hal.support.native_call_guard import NativeCallGuard

pytestmark = pytest.mark.slow

RANK = """
import datetime, threading, time, torch.distributed as dist
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD
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


def exit_code(context: str) -> int:
    program = RANK.format(context=context)
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=240)
    return process.returncode


def test_process_exits_cleanly_with_guarded_threads_in_calls() -> None:
    assert [exit_code("NATIVE_CALL_GUARD") for _ in range(3)] == [0, 0, 0]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="threads are no longer unwound")
def test_process_crashes_at_exit_without_thread_guard() -> None:
    context = "__import__('contextlib').nullcontext()"
    assert any(exit_code(context) for _ in range(3))


def test_guard_close_waits_for_threads_and_blocks_entry() -> None:
    guard, exit_event, resume_event = NativeCallGuard(), threading.Event(), threading.Event()

    def travel() -> None:
        with guard:
            exit_event.set()
            resume_event.wait(WATCHDOG)

    thread = threading.Thread(target=travel)
    thread.start()
    assert exit_event.wait(WATCHDOG)
    assert not guard.close(0.01)
    with pytest.raises(SystemExit), guard:
        pass
    resume_event.set()
    assert guard.close(WATCHDOG)
    thread.join(WATCHDOG)


def test_guard_close_is_bounded() -> None:
    guard = NativeCallGuard()
    with guard:
        assert not guard.close(0.0)
