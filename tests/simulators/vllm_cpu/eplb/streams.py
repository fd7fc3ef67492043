"""Streams and events where there is no accelerator: all work is done when it is asked for."""

import time
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from vllm.distributed.eplb import async_worker, eplb_communicator, eplb_state, eplb_utils

MODULES: tuple[ModuleType, ...] = (async_worker, eplb_communicator, eplb_state, eplb_utils)
"""That ask torch for streams or events."""


class HostStream:
    """A stream on which nothing is ever left to do."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        del arguments, keywords

    def synchronize(self) -> None:
        """Return at once: copies of host memory are done when they return."""

    def wait_event(self, event: "HostEvent") -> None:
        """Return at once."""


class HostEvent:
    """An event that has happened as soon as it is recorded."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        del arguments, keywords
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        del stream
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""
        del stream

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, later: "HostEvent") -> float:
        """Milliseconds between two records."""
        return (later._at - self._at) * 1000.0


class HostTorch(ModuleType):
    """torch, except for what only an accelerator has."""

    Stream = HostStream
    Event = HostEvent

    def __init__(self) -> None:
        super().__init__("torch")
        self._stream = HostStream()
        self.accelerator = SimpleNamespace(
            current_stream=lambda: self._stream,
            set_stream=lambda stream: None,
            set_device_index=lambda index: None,
            current_accelerator=lambda: torch.device("cpu"),
            is_available=lambda: False,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def stand_in_for_streams(modules: Iterable[ModuleType] = MODULES) -> None:
    """Let the modules of EPLB see `HostTorch` for torch; nobody else sees it.

    The hole: they ask for streams of an accelerator without asking whether there is one
    (vLLM issue 49702): `torch.accelerator` raises where torch has none, the thread that moves
    experts dies of it, and nobody hears of that.
    """
    host = HostTorch()
    for module in modules:
        module.torch = host  # type: ignore[attr-defined]
