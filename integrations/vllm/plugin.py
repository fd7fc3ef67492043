"""Behind the entry point of vLLM's general plugins: in every process of an engine, once or often.

It puts in two hooks that do nothing by themselves. One looks at the configuration when it is made,
and names our worker extension in it where a part is switched on; the other calls what later
versions of vLLM call by themselves, `init_worker_extension`, when a worker has its device.
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
"""What is named in the configuration."""
OWN_WORKER_PREFIX = "equipoise.integrations."
"""Worker classes of ours are in modules that have a `prepare` of their own."""
ASCEND_WORKER_PREFIX = "vllm_ascend."
"""Its platform names one of its own workers where none is asked for."""
ASCEND_WORKER_FLAG = "--worker-cls equipoise.integrations.vllm_ascend.Worker"
INIT_HOOK = "init_worker_extension"
"""Called on a worker that has its device, and no model yet."""


def register() -> None:
    """Put the hooks in; harmless where nothing is switched on.

    Raises `EngineUnsupported` where a part is asked for, and this vLLM has no place for a hook.
    """
    wrong = symbol_problems(compatibility.HOOK_SYMBOLS)
    if not wrong:
        apply_patches(HOOKS)
        return
    why = f"equipoise finds no place in this vLLM: {'; '.join(wrong)}"
    if is_requested():
        raise EngineUnsupported(f"{why} (tested: {', '.join(compatibility.TESTED_VERSIONS)})")
    LOG.warning("%s; it stays switched off", why)


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
        # Later versions have called the hook by now; to call it again does nothing.
        extend = getattr(self.worker, INIT_HOOK, None) or partial(disable_features, self.worker)
        extend()

    return init_device


HOOKS = (
    Patch("vllm.engine.arg_utils", "EngineArgs.create_engine_config", _configured),
    Patch("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_device", _wrap_init_device),
)
"""Everything that is put in where nothing is switched on."""


def prepare(config: Any, settings: Settings) -> None:
    """Have workers and clients that are made from `config` switch the parts on.

    A worker class of ours brings what it needs, and knows what it can serve; any other is extended.

    Raises:
        EngineUnsupported: this vLLM lacks what a part touches.
        IntegrationError: a part makes no sense with this configuration.
    """
    named = str(getattr(config.parallel_config, "worker_cls", ""))
    if named.startswith(OWN_WORKER_PREFIX):
        import_module(named.rpartition(".")[0]).prepare(config, settings)
    else:
        _extend(config, settings, named)
    if settings.routing is not None:
        core_client.prepare(settings.routing)
    if SETTINGS_KEY not in config.additional_config:
        # It came by the environment, which processes of the engine need not share.
        config.additional_config[SETTINGS_KEY] = json.loads(os.environ[SETTINGS_VARIABLE])
    LOG.info("equipoise: %s switched on", ", ".join(settings.enabled_features))


def _extend(config: Any, settings: Settings, named: str) -> None:
    """For a worker of vLLM's own. Raises as `prepare`."""
    if named.startswith(ASCEND_WORKER_PREFIX):
        raise IntegrationError(
            f"equipoise serves vllm-ascend's worker as {ASCEND_WORKER_FLAG}: not {named}"
        )
    compatibility.check_supported(
        settings.enabled_features, os.environ.get(compatibility.UNTESTED_VARIABLE)
    )
    raise_config_errors(config_errors(config, settings))
    _set_worker_extension(config.parallel_config)
    if settings.engine is not None or settings.handover is not None:
        # Read when a process first uses its device, which a worker does before we come.
        request_queues()


def raise_config_errors(wrong: Sequence[str]) -> None:
    """Raises `IntegrationError` if anything is wrong, naming all of it."""
    if wrong:
        raise IntegrationError(f"equipoise cannot be switched on: {'; '.join(wrong)}")


def config_errors(config: Any, settings: Settings) -> list[str]:
    """What of the engine's configuration leaves a part nothing to do, or is beyond it."""
    parallel = config.parallel_config
    wrong = []
    if (settings.policy or settings.engine) and not parallel.enable_eplb:
        wrong.append("policy and engine need --enable-eplb")
    if settings.engine is not None:
        wrong += eplb_config_errors(config, settings.engine)
    return wrong + non_eplb_config_errors(config, settings)


def non_eplb_config_errors(config: Any, settings: Settings) -> list[str]:
    """The same of the parts that have nothing to do with experts."""
    parallel = config.parallel_config
    wrong = []
    if settings.handover and parallel.pipeline_parallel_size < 2:
        wrong.append("handover needs --pipeline-parallel-size of at least 2")
    if settings.handover and uses_ray_compiled_graph(config):
        wrong.append(f"handover has no part in Ray's compiled graph ({RAY_EXECUTOR_VARIABLE}=0)")
    if settings.routing:
        wrong += core_client.dp_config_errors(config, settings.routing, os.environ)
    return wrong


def _set_worker_extension(parallel: Any) -> None:
    """Raises `IntegrationError` where another extension is named already."""
    named = parallel.worker_extension_cls
    if named and not issubclass(_import_class(named), _import_class(EXTENSION_CLASS)):
        raise IntegrationError(
            f"--worker-extension-cls is {named}: a worker takes one extension, so derive that "
            f"class from {EXTENSION_CLASS}"
        )
    parallel.worker_extension_cls = named or EXTENSION_CLASS


def _import_class(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    found: type = getattr(import_module(module), attribute)
    return found
