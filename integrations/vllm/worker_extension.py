"""The parts of a worker: switched on before it loads its model, and off with it.

What is added to an engine's worker: hooks that the engine calls, and calls for `collective_rpc`.

A worker's own methods come first: an extension adds names and overrides none, so each name here
must be one that no worker has.
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
    """What is switched on in one worker.

    Attributes:
        worker: the engine's.
        settings: what was asked for.
        exit_stack: closes what was opened for it.
    """

    worker: Any
    settings: Settings
    exit_stack: ExitStack

    def placement(self) -> list[list[int]] | None:
        """By layer, the expert in every slot; None where our engine is off."""
        return None if self.settings.eplb is None else install.current_placement(self.worker)

    def close(self) -> None:
        """Give back what was opened, the last first."""
        self.exit_stack.close()


def enable_features(worker: Any, settings: Settings) -> WorkerFeatures:
    """Switch on what belongs to a worker; the routing of requests is the front end's.

    Raises what a part raises; then none is on.
    """
    with ExitStack() as stack:
        disable_features(worker)
        if settings.eplb_policy is not None:
            stack.enter_context(install.install_policy(settings.eplb_policy))
        if settings.eplb is not None:
            stack.enter_context(install.install_eplb_state(worker, settings.eplb))
        if settings.pp_transport is not None:
            stack.enter_context(transport.install_transport(settings.pp_transport, worker.device))
        return WorkerFeatures(worker, settings, stack.pop_all())


def disable_features(worker: Any) -> None:
    """Nothing is asked for: an engine before this one in the process may have asked."""
    install.restore_policy()


def forward_logs_to_engine() -> None:
    """Have our log lines come where the engine's come: one an epoch, and warnings."""
    own_logger, engine_logger = logging.getLogger("equipoise"), logging.getLogger("vllm")
    for handler in engine_logger.handlers:
        if handler not in own_logger.handlers:
            own_logger.addHandler(handler)
    own_logger.setLevel(engine_logger.getEffectiveLevel())
    # The root logger gets handlers in some engines, and would tell everything once more.
    own_logger.propagate = not own_logger.handlers


def _close_at_shutdown(worker: Any) -> None:
    """The engine shuts a worker down, and not every version tells its extension."""
    shutdown = worker.shutdown

    def shut_down() -> None:
        worker.destroy_worker_extension()
        shutdown()

    worker.shutdown = shut_down


class WorkerExtension:
    """Named by `--worker-extension-cls`; the plugin does that."""

    equipoise_features: WorkerFeatures | None = None
    """What is switched on in this worker."""

    def init_worker_extension(self: Any) -> None:
        """The device is there, and no model yet: switch on what is asked for. Once."""
        if self.equipoise_features is None:
            requested = parse_settings(self.vllm_config.additional_config, os.environ)
            forward_logs_to_engine()
            self.equipoise_features = enable_features(self, requested or Settings())
            _close_at_shutdown(self)

    def destroy_worker_extension(self: Any) -> None:
        """Give back what was opened."""
        features, self.equipoise_features = self.equipoise_features, None
        if features is not None:
            features.close()

    def equipoise_counters(self) -> dict[str, int]:
        """`llm.collective_rpc("equipoise_counters")`: see `counters.NAMES`; one per worker."""
        return dict(COUNTERS.read())

    def equipoise_placement(self: Any) -> list[list[int]] | None:
        """Of the target model: by layer, the expert in every slot; None without our engine."""
        features = self.equipoise_features
        return None if features is None else features.placement()
