"""What a run cannot be asked for: found before any rank starts, each in one line."""

import os
from pathlib import Path

from equipoise.cli.options import EXPERTS, RunRequest
from equipoise.demo.settings import Balance, RunSettings
from equipoise.hal.errors import UsageError


def validate(request: RunRequest) -> None:
    """Raises UsageError naming the option, what it was and what it may be; creates nothing."""
    settings = request.settings
    _check_ranks(settings)
    _check_slots(settings)
    _check_cadence(settings)
    _check_backends(settings)
    _check_traffic(settings)
    _check_folder("--out", settings.out)
    check_file("--json", request.json)
    check_file("--html", request.html)


def _check_ranks(settings: RunSettings) -> None:
    if settings.ranks < 1:
        raise UsageError(f"--ranks must be at least 1, got {settings.ranks}")
    if EXPERTS % settings.ranks:
        raise UsageError(
            f"--ranks {settings.ranks} does not divide {EXPERTS} experts evenly: "
            "without balancing each rank holds as many"
        )
    if settings.deadline <= 0:
        raise UsageError(f"--deadline must be above 0 seconds, got {settings.deadline:g}")


def _check_slots(settings: RunSettings) -> None:
    ranks, slots = settings.ranks, settings.slots
    if slots < EXPERTS:
        raise UsageError(f"--slots {slots} is fewer than the {EXPERTS} experts of a layer")
    if slots % ranks:
        raise UsageError(f"--slots {slots} is not divisible by --ranks {ranks}")


def _check_cadence(settings: RunSettings) -> None:
    for flag, value in (
        ("--steps", settings.steps),
        ("--window-size", settings.window_size),
        ("--step-interval", settings.step_interval),
    ):
        if value < 1:
            raise UsageError(f"{flag} must be at least 1, got {value}")
    window, interval = settings.window_size, settings.step_interval
    if window > interval:
        raise UsageError(f"--window-size {window} is longer than --step-interval {interval}")
    if settings.balance is Balance.ON and settings.steps <= window:
        raise UsageError(
            f"--steps {settings.steps} is too few: no step is left after a load window of {window}"
        )
    if settings.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {settings.seed}")


def _check_backends(settings: RunSettings) -> None:
    from equipoise.hal import registry

    for flag, name, group in (
        ("--backend", settings.backend, registry.ACCELERATORS),
        ("--communicator", settings.communicator, registry.COMMUNICATORS),
    ):
        known = registry.names(group)
        if name not in known and ":" not in name:
            raise UsageError(f"{flag}: unknown name {name!r}; known: {', '.join(known) or 'none'}")


def _check_traffic(settings: RunSettings) -> None:
    from equipoise.demo.traffic import load_phases

    phases = load_phases(settings.text)
    if settings.steps < len(phases):
        raise UsageError(f"--steps {settings.steps} is fewer than the {len(phases)} texts")


def _check_folder(flag: str, path: Path) -> None:
    """`path` is a folder that can be written to, or can be made."""
    nearest = next((p for p in (path, *path.absolute().parents) if os.path.lexists(p)), path)
    if not nearest.is_dir():
        raise UsageError(f"{flag}: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{flag}: {nearest} cannot be written to")


def check_file(flag: str, path: Path) -> None:
    """Raises UsageError unless `path` can be written as a file."""
    if path.is_dir():
        raise UsageError(f"{flag}: {path} is a folder, not a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"{flag}: {path} cannot be written to")
    _check_folder(flag, path.parent)
