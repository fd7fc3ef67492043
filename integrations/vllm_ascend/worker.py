"""Our worker for vllm-ascend: its own worker with our features."""

import os
from contextlib import ExitStack
from functools import cache
from typing import Any

from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.plugin import raise_config_errors
from equipoise.integrations.vllm.pp import transport
from equipoise.integrations.vllm.settings import Settings, parse_settings
from equipoise.integrations.vllm.worker_extension import (
    WorkerExtension,
    WorkerFeatures,
    forward_logs_to_engine,
)
from equipoise.integrations.vllm_ascend import compatibility, eplb_policy
from equipoise.integrations.vllm_ascend.config_check import config_errors
from equipoise.integrations.vllm_ascend.eplb_policy import SharedCounters

WorkerBase: Any = object
"""Stands for vllm-ascend's worker, which `worker_class` adds as a base at run time."""


class AscendWorkerExtension(WorkerExtension, WorkerBase):  # type: ignore[misc]
    """Mixin before vllm-ascend's worker; does not override methods that run in every step.

    So an idle data-parallel rank enters the same collectives as without us. Nothing here uses the
    device before the worker has set it.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Check settings and symbols before the worker does anything.

        Raises:
            EngineUnsupported: one error that names every difference from the tested releases.
            ConfigError: the settings are invalid.
            IntegrationError: a feature cannot work with this configuration.
        """
        requested = parse_settings(vllm_config.additional_config, os.environ)
        if requested is not None:
            compatibility.check_worker(requested.enabled_features, os.environ)
            raise_config_errors(config_errors(vllm_config, requested))
        self.equipoise_settings = requested or Settings()
        self.equipoise_policy_counters = SharedCounters()
        base: Any = super()
        base.__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """Install the policy before the worker creates its runner, and what needs a device
        after."""
        settings = self.equipoise_settings
        forward_logs_to_engine()
        with ExitStack() as stack:
            if settings.eplb_policy is not None:
                policy = eplb_policy.install_policy(
                    settings.eplb_policy, self.equipoise_policy_counters
                )
                stack.enter_context(policy)
            super().init_device()
            if settings.pp_transport is not None:
                stack.enter_context(transport.install_transport(settings.pp_transport, self))
            self.equipoise_features = WorkerFeatures(self, settings, stack.pop_all())

    def init_worker_extension(self) -> None:
        """Do nothing: `init_device` has switched the features on."""

    def shutdown(self) -> None:
        """Close the features, and shut the worker down."""
        try:
            self.destroy_worker_extension()
        finally:
            super().shutdown()

    def equipoise_counters(self) -> dict[str, int]:
        """`llm.collective_rpc("equipoise_counters")`: this process's and its planner's."""
        counters = dict(COUNTERS.read())
        for name, count in self.equipoise_policy_counters.read().items():
            counters[name] = counters.get(name, 0) + count
        return counters


@cache
def worker_class() -> type:
    """Return the class of vLLM's worker. Raises `EngineUnsupported`."""
    try:
        from vllm_ascend.worker.worker import NPUWorker
    except ImportError as error:
        raise EngineUnsupported(f"vllm-ascend's worker cannot be imported: {error}") from error
    return type(
        "Worker",
        (AscendWorkerExtension, NPUWorker),
        {"__module__": __package__, "__doc__": "See `AscendWorkerExtension`."},
    )
