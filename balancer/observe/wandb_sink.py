"""Logs rebalances and load to Weights & Biases; imports wandb only when it is asked for."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from equipoise.balancer.experts.runtime.events import (
    BalanceMeasured,
    BatchBalanceMeasured,
    Event,
    RebalanceMeasured,
)
from equipoise.balancer.observe.log_lines import rebalance_fields
from equipoise.balancer.observe.wandb_module import MODULE, require_wandb


class WandbSink:
    """Logs every rebalance, and the balance of every sub-window and sampled step, to one run.

    Args:
        project: name of the project.
        settings: stored as the run's configuration.

    Raises:
        WandbMissing: wandb is not installed.
    """

    def __init__(self, project: str, settings: Mapping[str, object]) -> None:
        require_wandb()
        self._project = project
        self._settings = dict(settings)
        self._run: Any = None

    def emit(self, event: Event) -> None:
        """Implements `EventSink`."""
        match event:
            case RebalanceMeasured(record):
                self._log("rebalance", rebalance_fields(record))
            case BalanceMeasured():
                even = {"balancedness": event.balancedness, "imbalance": event.imbalance}
                self._log("load", {"step": event.step, **even})
            case BatchBalanceMeasured(step, _, imbalance, unlevelled):
                batch = {"imbalance": imbalance, "unlevelled_imbalance": unlevelled}
                self._log("batch", {"step": step, **batch})

    def close(self) -> None:
        """Finishes the run, if one was started."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _log(self, group: str, fields: Mapping[str, object]) -> None:
        # Started here, on the thread of `AsyncEventSink`: signing on takes seconds, which neither
        # the opening of an engine nor a step should wait for.
        if self._run is None:
            self._run = import_module(MODULE).init(project=self._project, config=self._settings)
        self._run.log({f"{group}/{name}": value for name, value in fields.items()})
