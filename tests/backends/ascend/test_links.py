"""A link that is being made hears every failure, and tells whoever waits. Needs no device."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.backends.ascend import native
from equipoise.backends.ascend.links import Link
from equipoise.backends.ascend.work import Bell, HcclWork
from equipoise.backends.devices.patience import Patience
from equipoise.hal.errors import CommunicatorFailed

SOON = 10.0


class Unready:
    """An event that a stream cannot be made to wait for."""

    def record(self) -> None:
        """The caller's stream is well."""

    def wait(self) -> None:
        """The link's own is not."""
        raise RuntimeError("the stream is broken")


@pytest.fixture(autouse=True)
def vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "npu", lambda: SimpleNamespace(Event=Unready))
    monkeypatch.setattr(native, "current", lambda lane: nullcontext())


def made(make: Any) -> Link:
    def patience(expiry: float) -> Patience:
        return Patience(expiry, threading.Event())

    return Link("link", "isend", make, patience, lambda: None)


def issued(link: Link) -> HcclWork:
    work = HcclWork("isend to 1", SOON, lambda failure: None, Bell(0, None))
    link.issue(work, torch.zeros(1, dtype=torch.int8))
    return work


def test_what_cannot_be_launched_late_fails_at_once_and_the_link_is_there() -> None:
    link = made(lambda patience: SimpleNamespace(lane=None))
    work = issued(link)
    with pytest.raises(CommunicatorFailed, match="was not launched: the stream is broken"):
        work.result(SOON / 2)
    link.warm(time.monotonic() + SOON)


def test_a_link_that_cannot_be_made_fails_what_waited_for_it() -> None:
    def fail(patience: Patience) -> None:
        raise CommunicatorFailed("nobody came")

    link = made(fail)
    with pytest.raises(CommunicatorFailed, match="found no link: nobody came"):
        issued(link).result(SOON / 2)
    with pytest.raises(CommunicatorFailed, match="found no link"):
        link.warm(time.monotonic() + SOON)
