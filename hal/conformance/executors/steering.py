"""Devices whose schedule can be chosen: finds the function that receives a case's choices."""

from collections.abc import Callable
from importlib import import_module

from equipoise.hal.errors import UsageError

Steer = Callable[[bytes], object]
"""Receives the choices of the next case, one per byte; it decides what follows the last one."""


def load_steer(name: str) -> Steer:
    """The callable that is named as PACKAGE:OBJECT.

    What it raises when it is called becomes a `UsageError` too, since it says nothing of the
    backend under test. Raises `UsageError` when there is no such callable.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UsageError(f"{name!r} is not PACKAGE:OBJECT")
    try:
        steer: object = getattr(import_module(module), attribute)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{name!r} does not import: {reason}") from error
    if not callable(steer):
        raise UsageError(f"{name!r} cannot be called: {steer!r}")
    return _guard_call(name, steer)


def _guard_call(name: str, call: Callable[[bytes], object]) -> Steer:
    def steer(schedule: bytes) -> None:
        try:
            call(schedule)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(f"{name!r} cannot steer: {reason}") from error

    return steer
