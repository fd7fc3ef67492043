"""The vLLM plugin: what happens to a configuration that names features.

`entry` imports this for such a configuration only.
"""

import json
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from equipoise.backends.cuda.cuda_runtime import request_queues
from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm import compatibility
from equipoise.integrations.vllm.dp import core_client
from equipoise.integrations.vllm.entry import (
    LOG,
    SETTINGS_KEY,
    SETTINGS_VARIABLE,
    hook_worker,
)
from equipoise.integrations.vllm.eplb.config_check import (
    RAY_EXECUTOR_VARIABLE,
    eplb_config_errors,
    ignored_eplb_options,
    uses_ray_compiled_graph,
)
from equipoise.integrations.vllm.eplb.install import restore_policy
from equipoise.integrations.vllm.settings import Settings, is_variable_ignored, parse_settings

EXTENSION_CLASS = "equipoise.integrations.vllm.worker_extension.WorkerExtension"
"""The worker extension that is set in the configuration."""
OWN_WORKER_PREFIX = "equipoise.integrations."
"""Our own worker classes; their packages have a `prepare` of their own."""
ASCEND_WORKER_PREFIX = "vllm_ascend."
"""vllm-ascend's workers; its platform sets one of them if the user sets none."""
ASCEND_WORKER_FLAG = "--worker-cls equipoise.integrations.vllm_ascend.Worker"


def switch_on(config: Any) -> None:
    """Switch on the features that a configuration names, if it names any.

    Raises as `prepare`, and `ConfigError` for invalid settings.
    """
    settings = parse_settings(config.additional_config, os.environ)
    if is_variable_ignored(config.additional_config, os.environ):
        LOG.warning(
            "equipoise: --additional-config has settings, so those of %s are not used",
            SETTINGS_VARIABLE,
        )
    if settings is not None:
        prepare(config, settings)
    else:
        switch_off()


def switch_off() -> None:
    """Undo what an earlier engine may have left in this process."""
    restore_policy()


def prepare(config: Any, settings: Settings) -> None:
    """Make workers and clients that are created from `config` switch the features on.

    Our own worker classes check and set up what they need; any other worker gets the extension.

    Raises:
        EngineUnsupported: this vLLM lacks a symbol that a feature uses.
        IntegrationError: a feature cannot work with this configuration.
    """
    worker_class = str(getattr(config.parallel_config, "worker_cls", ""))
    if worker_class.startswith(OWN_WORKER_PREFIX):
        import_module(worker_class.rpartition(".")[0]).prepare(config, settings)
    else:
        _extend(config, settings, worker_class)
    if settings.dp_load_balancer is not None:
        core_client.prepare(settings.dp_load_balancer)
    if config.additional_config.get(SETTINGS_KEY) is None:
        # They came from the environment, which other processes of the engine may not share.
        config.additional_config[SETTINGS_KEY] = json.loads(os.environ[SETTINGS_VARIABLE])
    LOG.info("equipoise: %s switched on", ", ".join(settings.enabled_features))


def _extend(config: Any, settings: Settings, worker_class: str) -> None:
    """Set the extension for a worker of vLLM. Raises as `prepare`."""
    if worker_class.startswith(ASCEND_WORKER_PREFIX):
        raise IntegrationError(
            f"equipoise serves vllm-ascend's worker as {ASCEND_WORKER_FLAG}: not {worker_class}"
        )
    compatibility.check_supported(
        settings.enabled_features, os.environ.get(compatibility.ACCEPT_VERSION_VARIABLE)
    )
    raise_config_errors(config_errors(config, settings))
    if settings.eplb is not None and (ignored := ignored_eplb_options(config)):
        LOG.warning(
            "equipoise: eplb takes the place of vLLM's EPLB, so --eplb-config %s has no effect; "
            "the transport is option communicator of eplb",
            ", ".join(ignored),
        )
    _set_worker_extension(config.parallel_config)
    # For workers of this process, or forked from it; others have it from `entry.register`.
    hook_worker()
    if settings.eplb is not None or settings.pp_transport is not None:
        # CUDA reads it when a process first uses its device, before the extension runs in a worker.
        request_queues()


def raise_config_errors(errors: Sequence[str]) -> None:
    """Raise one `IntegrationError` that lists all problems, if there are any."""
    if errors:
        raise IntegrationError(f"equipoise cannot be switched on: {'; '.join(errors)}")


def config_errors(config: Any, settings: Settings) -> list[str]:
    """List why features cannot work with this configuration, or would have no effect."""
    parallel = config.parallel_config
    errors = []
    if (settings.eplb_policy or settings.eplb) and not parallel.enable_eplb:
        errors.append("eplb_policy and eplb need --enable-eplb")
    if settings.eplb is not None:
        errors += eplb_config_errors(config, settings.eplb)
    return errors + non_eplb_config_errors(config, settings)


def non_eplb_config_errors(config: Any, settings: Settings) -> list[str]:
    """The same for the features other than `eplb` and `eplb_policy`."""
    parallel = config.parallel_config
    errors = []
    if settings.pp_transport and parallel.pipeline_parallel_size < 2:
        errors.append("pp_transport needs --pipeline-parallel-size of at least 2")
    if settings.pp_transport and getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        errors.append(
            "pp_transport needs all rows of a step on every rank, and prefill context parallelism "
            "divides them"
        )
    if settings.pp_transport and getattr(parallel, "enable_fault_tolerance", False):
        errors.append(
            "pp_transport has messages in flight, which a step that --enable-fault-tolerance "
            "abandons leaves behind"
        )
    if settings.pp_transport and uses_ray_compiled_graph(config):
        errors.append(
            f"pp_transport is not used in Ray's compiled graph ({RAY_EXECUTOR_VARIABLE}=0)"
        )
    if settings.dp_load_balancer:
        errors += core_client.dp_config_errors(config, settings.dp_load_balancer, os.environ)
    return errors


def _set_worker_extension(parallel: Any) -> None:
    """Set the worker extension. Raises `IntegrationError` if another one is set."""
    extension_class = parallel.worker_extension_cls
    if extension_class and not issubclass(
        _import_class(extension_class), _import_class(EXTENSION_CLASS)
    ):
        raise IntegrationError(
            f"--worker-extension-cls is {extension_class}: a worker takes one extension, so "
            f"derive that class from {EXTENSION_CLASS}"
        )
    parallel.worker_extension_cls = extension_class or EXTENSION_CLASS


def _import_class(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    cls: type = getattr(import_module(module), attribute)
    return cls
