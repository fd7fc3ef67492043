"""Epochs as points of a chart at Weights & Biases; asked for by name, imported only then."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from equipoise import install_command
from equipoise.balancer.experts.runtime.events import BalanceMeasured, Event, RebalanceMeasured
from equipoise.balancer.observe.log_lines import rebalance_fields
from equipoise.hal.errors import UsageError

MODULE = "wandb"


class WandbMissing(UsageError):
    """wandb, which is optional, is not installed."""


class WandbSink:
    """Logs every epoch, and how even every sub-window was.

    The run is opened by the first thing to log, on the courier's thread: to sign on takes seconds,
    which no step waits for.

    Args:
        project: where the run is shown.
        settings: kept with the run.

    Raises:
        WandbMissing: wandb is not installed.
    """

    def __init__(self, project: str, settings: Mapping[str, object]) -> None:
        require_wandb()
        self._project = project
        self._settings = dict(settings)
        self._run: Any = None

    def emit(self, entry: Event) -> None:
        """See `StatLogger`."""
        match entry:
            case RebalanceMeasured(record):
                self._log("epoch", rebalance_fields(record))
            case BalanceMeasured():
                even = {"balancedness": entry.balancedness, "imbalance": entry.imbalance}
                self._log("load", {"step": entry.step, **even})

    def close(self) -> None:
        """End the run, if there is one."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _log(self, group: str, fields: Mapping[str, object]) -> None:
        if self._run is None:
            self._run = import_module(MODULE).init(project=self._project, config=self._settings)
        self._run.log({f"{group}/{name}": value for name, value in fields.items()})


def require_wandb() -> None:
    """Raises `WandbMissing`; imports nothing."""
    if find_spec(MODULE) is None:
        raise WandbMissing(f"wandb is missing: {install_command('wandb')}")
