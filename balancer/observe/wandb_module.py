"""The optional package wandb: its name, and whether it is installed.

Apart from what logs rebalances there: the proxy logs requests, and loads nothing of experts.
"""

from importlib.util import find_spec

from equipoise import install_command
from equipoise.hal.errors import UsageError

MODULE = "wandb"


class WandbMissing(UsageError):
    """The optional package wandb is not installed."""


def require_wandb() -> None:
    """Raises `WandbMissing` if wandb is not installed; does not import it."""
    if find_spec(MODULE) is None:
        raise WandbMissing(f"wandb is missing: {install_command('wandb')}")
