"""Where `cuda.py` runs: the device that it opens, and everything a figure is said with."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from cuda_clock import DEADLINE, Clock

from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator, Backend
from equipoise.hal.capabilities import Unavailable
from equipoise.hal.errors import BackendUnavailable
from equipoise.hal.stream import Role

NOT_HERE = "-"
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
PATIENCE = 20.0
"""Seconds that a tool may take to say what the driver is."""


@dataclass(frozen=True)
class Place:
    """An opened device, and the backend that it is of."""

    backend: Backend
    accelerator: Accelerator

    @property
    def on_device(self) -> bool:
        """Whether it is the kind of device that is measured."""
        return self.accelerator.device.type == "cuda"

    def clock(self, role: Role) -> Clock:
        """Of one of its streams."""
        return Clock(self.accelerator, self.accelerator.stream(role))

    def graph(self) -> Any:
        """An empty graph; None where there are none."""
        return self.accelerator.graph() if self.backend.capabilities.graph_capture else None

    def settle(self) -> None:
        """Everything that was launched has run, also on the stream that torch takes by itself."""
        self.accelerator.synchronize(DEADLINE)
        if self.on_device:
            torch.cuda.synchronize(self.accelerator.device)


def missing(name: str) -> str | None:
    """Why there is no device of that backend here; None where there is one."""
    try:
        backend = registry.accelerator(name)
    except BackendUnavailable as error:
        return str(error)
    found = backend.probe()
    if isinstance(found, Unavailable):
        return found.reason
    return None if backend.devices() > 0 else f"backend {name!r} has no device"


@contextmanager
def opened(name: str) -> Iterator[Place]:
    """Its first device."""
    backend = registry.accelerator(name)
    accelerator = backend.open(0)
    try:
        yield Place(backend, accelerator)
    finally:
        accelerator.close()


def facts(place: Place) -> dict[str, str]:
    """Device, driver and versions, in words; `-` for what there is not."""
    device = place.accelerator.device
    known = {
        "backend": place.backend.name,
        "device": place.accelerator.name,
        "driver": NOT_HERE,
        "runtime": torch.version.cuda or NOT_HERE,
        "torch": torch.__version__,
        "triton": _version("triton"),
    }
    if place.on_device:
        about = torch.cuda.get_device_properties(device)
        known["device"] = (
            f"{about.name}, {about.total_memory / 2**30:.0f} GiB, "
            f"{about.multi_processor_count} multiprocessors"
        )
        known["driver"] = _driver()
    return known


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_HERE


def _driver() -> str:
    """The driver's version, as its own tool says it."""
    if shutil.which(DRIVER[0]) is None:
        return NOT_HERE
    try:
        done = subprocess.run(DRIVER, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return NOT_HERE
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else NOT_HERE
