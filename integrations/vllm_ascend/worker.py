"""The worker: vllm-ascend's own, which switches our parts on around its device."""

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
"""What comes behind it is vllm-ascend's worker."""


class AscendWorkerExtension(WorkerExtension, WorkerBase):  # type: ignore[misc]
    """Stands before vllm-ascend's worker, and leaves its methods of every step alone.

    So an idle data-parallel rank enters the collectives that it enters without us. Nothing here
    touches the device before the worker has set it.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Look at everything that is asked for before the worker does anything.

        Raises:
            EngineUnsupported: one error that names everything that is not as it was tested.
            ConfigError, IntegrationError: what is asked for cannot be had.
        """
        asked = parse_settings(vllm_config.additional_config, os.environ)
        if asked is not None:
            compatibility.check_worker(asked.enabled_features, os.environ)
            raise_config_errors(config_errors(vllm_config, asked))
        self.equipoise_settings = asked or Settings()
        self.equipoise_policy_counters = SharedCounters()
        behind: Any = super()
        behind.__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """Before the worker makes its runner the policy, behind it what needs a device."""
        settings = self.equipoise_settings
        forward_logs_to_engine()
        with ExitStack() as opened:
            if settings.eplb_policy is not None:
                policy = eplb_policy.install_policy(
                    settings.eplb_policy, self.equipoise_policy_counters
                )
                opened.enter_context(policy)
            super().init_device()
            if settings.pp_transport is not None:
                opened.enter_context(
                    transport.install_transport(settings.pp_transport, self.device)
                )
            self.equipoise_features = WorkerFeatures(self, settings, opened.pop_all())

    def init_worker_extension(self) -> None:
        """Nothing: whoever calls this comes when the device is there, and so are the parts."""

    def shutdown(self) -> None:
        """Give back what was opened, and shut the worker down."""
        try:
            self.destroy_worker_extension()
        finally:
            super().shutdown()

    def equipoise_counters(self) -> dict[str, int]:
        """`llm.collective_rpc("equipoise_counters")`: this process's and its planner's."""
        counted = dict(COUNTERS.read())
        for name, count in self.equipoise_policy_counters.read().items():
            counted[name] = counted.get(name, 0) + count
        return counted


@cache
def worker_class() -> type:
    """The class that vLLM makes a worker of. Raises `EngineUnsupported`."""
    try:
        from vllm_ascend.worker.worker import NPUWorker
    except ImportError as error:
        raise EngineUnsupported(f"vllm-ascend's worker cannot be imported: {error}") from error
    return type(
        "Worker",
        (AscendWorkerExtension, NPUWorker),
        {"__module__": __package__, "__doc__": "See `AscendWorkerExtension`."},
    )
