"""The vLLM plugin: hooks that switch features on, in every process of an engine.

vLLM may call `register` several times. It installs two hooks, which do nothing by themselves. The
first runs when a configuration is created: if a feature is on, it sets our worker extension. The
second calls `init_worker_extension` when a worker has its device, which later versions of vLLM do
themselves.
"""

import json
import os
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from typing import Any

from equipoise.backends.cuda.cuda_runtime import request_queues
from equipoise.hal.errors import EngineUnsupported, IntegrationError
from equipoise.integrations.vllm import compatibility
from equipoise.integrations.vllm.compatibility import symbol_problems
from equipoise.integrations.vllm.dp import core_client
from equipoise.integrations.vllm.entry import LOG, is_requested
from equipoise.integrations.vllm.eplb.config_check import (
    RAY_EXECUTOR_VARIABLE,
    eplb_config_errors,
    ignored_eplb_options,
    uses_ray_compiled_graph,
)
from equipoise.integrations.vllm.patching import Patch, apply_patches
from equipoise.integrations.vllm.settings import (
    SETTINGS_KEY,
    SETTINGS_VARIABLE,
    Settings,
    parse_settings,
)
from equipoise.integrations.vllm.worker_extension import disable_features

EXTENSION_CLASS = "equipoise.integrations.vllm.worker_extension.WorkerExtension"
"""The worker extension that is set in the configuration."""
OWN_WORKER_PREFIX = "equipoise.integrations."
"""Our own worker classes; their packages have a `prepare` of their own."""
ASCEND_WORKER_PREFIX = "vllm_ascend."
"""vllm-ascend's workers; its platform sets one of them if the user sets none."""
ASCEND_WORKER_FLAG = "--worker-cls equipoise.integrations.vllm_ascend.Worker"
INIT_HOOK = "init_worker_extension"
"""Called on a worker that has its device, but no model yet."""


def register() -> None:
    """Install the hooks; they do nothing unless a feature is on.

    Raises `EngineUnsupported` if a feature is configured and this vLLM lacks what a hook needs.
    """
    problems = symbol_problems(compatibility.HOOK_SYMBOLS)
    if not problems:
        apply_patches(HOOKS)
        return
    message = f"equipoise finds no place in this vLLM: {'; '.join(problems)}"
    if is_requested():
        raise EngineUnsupported(f"{message} (tested: {', '.join(compatibility.TESTED_VERSIONS)})")
    LOG.warning("%s; it stays switched off", message)


def _configured(create: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        settings = parse_settings(config.additional_config, os.environ)
        if settings is not None:
            prepare(config, settings)
        return config

    return create_engine_config


def _wrap_init_device(init: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(init)
    def init_device(self: Any) -> None:
        init(self)
        # Later versions have called the extension by now; a second call does nothing.
        extend = getattr(self.worker, INIT_HOOK, None) or partial(disable_features, self.worker)
        extend()

    return init_device


HOOKS = (
    Patch("vllm.engine.arg_utils", "EngineArgs.create_engine_config", _configured),
    Patch("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_device", _wrap_init_device),
)
"""All that is replaced while no feature is on."""


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
    if SETTINGS_KEY not in config.additional_config:
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
