"""What the proxy and the load client need beyond the package's own dependencies."""

from importlib.util import find_spec

from equipoise import install_command
from equipoise.hal.errors import UsageError

NEEDED = ("aiohttp", "prometheus_client")


class ServeMissing(UsageError):
    """Something optional is not installed."""


def require() -> None:
    """Raises ServeMissing; imports nothing."""
    for name in NEEDED:
        if find_spec(name) is None:
            raise ServeMissing(f"{name} is missing: {install_command('serve')}")
