"""What the proxy, the picker and the load client need beyond the package's own dependencies."""

from importlib.util import find_spec

from equipoise import install_command
from equipoise.hal.errors import UsageError

NEEDED = ("aiohttp", "prometheus_client")
PICKER_NEEDED = ("grpc", "grpc_health.v1", "envoy.service.ext_proc.v3")


class ServeMissing(UsageError):
    """Something optional is not installed."""


def require() -> None:
    """Raises ServeMissing; imports nothing."""
    _require(NEEDED, "serve")


def require_picker() -> None:
    """Raises ServeMissing; imports nothing."""
    _require((*NEEDED, *PICKER_NEEDED), "picker")


def _require(names: tuple[str, ...], extra: str) -> None:
    for name in names:
        try:
            spec = find_spec(name)
        except ModuleNotFoundError:  # of the package that it would be in
            spec = None
        if spec is None:
            raise ServeMissing(f"{name} is missing: {install_command(extra)}")
