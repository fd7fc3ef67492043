"""The worker extension: switches features on before the model is loaded, and off at shutdown.

It adds hooks that the engine calls, and methods for `collective_rpc`. An extension cannot override
methods of a worker, only add some. So each name here must be one that no worker has.
"""

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.eplb import install
from equipoise.integrations.vllm.pp import transport
from equipoise.integrations.vllm.settings import Settings, parse_settings


@dataclass(frozen=True)
class WorkerFeatures:
    """The features of one worker.

    Attributes:
        worker: the engine's worker.
        settings: its settings.
        exit_stack: closes what was opened.
    """

    worker: Any
    settings: Settings
    exit_stack: ExitStack

    def placement(self) -> list[list[int]] | None:
        """Return the expert in every slot, by layer; None if `eplb` is off."""
        return None if self.settings.eplb is None else install.current_placement(self.worker)

    def close(self) -> None:
        """Close what was opened, in reverse order."""
        self.exit_stack.close()


def enable_features(worker: Any, settings: Settings) -> WorkerFeatures:
    """Switch on the features of a worker; `dp_load_balancer` belongs to the front end.

    Raises what a feature raises; then none is on.
    """
    with ExitStack() as stack:
        # What an earlier engine in this process may have left.
        install.restore_policy()
        if settings.eplb_policy is not None:
            stack.enter_context(install.install_policy(settings.eplb_policy))
        if settings.eplb is not None:
            stack.enter_context(install.install_eplb_state(worker, settings.eplb))
        if settings.pp_transport is not None:
            stack.enter_context(transport.install_transport(settings.pp_transport, worker))
        return WorkerFeatures(worker, settings, stack.pop_all())


def forward_logs_to_engine() -> None:
    """Send our log lines to the engine's handlers: one per rebalance, and warnings."""
    own_logger, engine_logger = logging.getLogger("equipoise"), logging.getLogger("vllm")
    for handler in engine_logger.handlers:
        if handler not in own_logger.handlers:
            own_logger.addHandler(handler)
    own_logger.setLevel(engine_logger.getEffectiveLevel())
    # Some engines add handlers to the root logger, which would log each line a second time.
    own_logger.propagate = not own_logger.handlers


def _close_at_shutdown(worker: Any) -> None:
    """Close the features when the engine shuts a worker down; not every vLLM calls the hook."""
    shutdown = worker.shutdown

    def shut_down() -> None:
        worker.destroy_worker_extension()
        shutdown()

    worker.shutdown = shut_down


class WorkerExtension:
    """The class for `--worker-extension-cls`, which the plugin sets."""

    equipoise_features: WorkerFeatures | None = None
    """The features of this worker."""

    def init_worker_extension(self: Any) -> None:
        """Switch features on, once: the worker has a device, but no model yet."""
        if self.equipoise_features is None:
            requested = parse_settings(self.vllm_config.additional_config, os.environ)
            forward_logs_to_engine()
            self.equipoise_features = enable_features(self, requested or Settings())
            _close_at_shutdown(self)

    def destroy_worker_extension(self: Any) -> None:
        """Close what was opened."""
        features, self.equipoise_features = self.equipoise_features, None
        if features is not None:
            features.close()

    def equipoise_counters(self) -> dict[str, int]:
        """`llm.collective_rpc("equipoise_counters")`: see `counters.COUNTER_NAMES`; one per
        worker."""
        return dict(COUNTERS.read())

    def equipoise_placement(self: Any) -> list[list[int]] | None:
        """Return the expert in every slot of the target model, by layer; None without `eplb`."""
        features = self.equipoise_features
        return None if features is None else features.placement()
