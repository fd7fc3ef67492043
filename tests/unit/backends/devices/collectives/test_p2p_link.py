"""A link that is being made hears every failure, and tells whoever waits. Needs no device."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.watchdog import WATCHDOG

from equipoise.backends.common.bounded_wait import Deadline
from equipoise.backends.devices.collectives.ccl import DeferredEvent
from equipoise.backends.devices.collectives.p2p_link import LinkSpec, P2PLink
from equipoise.backends.devices.collectives.work import DeviceWork, StreamReleaser
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import CommunicatorFailed


class FailingEvent:
    """An event that a stream cannot be made to wait for."""

    def record(self, stream: Any) -> None:
        """The caller's stream is well."""

    def wait(self, stream: Any) -> None:
        """The link's own is not."""
        raise RuntimeError("the stream is broken")


VENDOR: Any = SimpleNamespace(
    set_thread_device=lambda index: None,
    current=lambda stream: nullcontext(),
    current_stream=lambda index: None,
    event=FailingEvent,
)
DEVICE = Device(VENDOR, 0)


def no_promise() -> DeferredEvent:
    raise AssertionError("no stream waits")


def make_link(make: Any) -> P2PLink:
    def make_deadline(expiry: float) -> Deadline:
        return Deadline(expiry, threading.Event())

    return P2PLink(LinkSpec("library", "link", "isend", DEVICE), make, make_deadline)


def issue_send(link: P2PLink) -> DeviceWork:
    work = DeviceWork(
        "isend to 1", WATCHDOG, lambda failure: None, StreamReleaser(DEVICE, None, no_promise)
    )
    link.issue(work, torch.zeros(1, dtype=torch.int8))
    return work


def test_link_fails_unlaunchable_operation_and_stays_usable() -> None:
    link = make_link(lambda deadline: SimpleNamespace(stream=None))
    work = issue_send(link)
    with pytest.raises(CommunicatorFailed, match="was not launched: the stream is broken"):
        work.result(WATCHDOG)
    link.connect(time.monotonic() + WATCHDOG)


def test_failed_link_fails_waiting_operations() -> None:
    def fail(deadline: Deadline) -> None:
        raise CommunicatorFailed("nobody came")

    link = make_link(fail)
    with pytest.raises(CommunicatorFailed, match="was not connected: nobody came"):
        issue_send(link).result(WATCHDOG)
    with pytest.raises(CommunicatorFailed, match="was not connected"):
        link.connect(time.monotonic() + WATCHDOG)
